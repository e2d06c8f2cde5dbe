// Keeps the library with CUDA code loadable by glibc 2.28, whichever newer glibc it is linked
// against.
//
// CUDA's static runtime calls the functions below. Since glibc 2.34 they lie in libc itself, and
// the linker binds them to the version of that move, although the functions of the older versions
// do the same. setup.py reads the names from here and links with --wrap=name, so that the calls
// arrive here and go on to the oldest version. They are jumps and not calls, because dlopen and
// dlsym look at the address that they return to.
//
// Before glibc 2.34 these functions lie in libpthread, libdl and librt. libtorch needs all three,
// so they are loaded.

#if defined(FASTQT_CUDA_ON_GLIBC)

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#define FIRST_DLMOPEN "GLIBC_2.3.4"
#define JUMP(name) "  jmp first_" #name "@PLT\n"
#else
#define FIRST_VERSION "GLIBC_2.17"
#define FIRST_DLMOPEN "GLIBC_2.17"
#define JUMP(name) "  b first_" #name "\n"
#endif

#define OF_VERSION(name, version)                       \
  __asm__(".symver first_" #name ", " #name "@" version \
          "\n"                                          \
          ".text\n"                                     \
          ".p2align 4\n"                                \
          ".globl __wrap_" #name                        \
          "\n"                                          \
          ".hidden __wrap_" #name                       \
          "\n"                                          \
          ".type __wrap_" #name                         \
          ", %function\n"                               \
          "__wrap_" #name ":\n" JUMP(name) ".size __wrap_" #name ", . - __wrap_" #name "\n");
#define FIRST(name) OF_VERSION(name, FIRST_VERSION)

OF_VERSION(dlmopen, FIRST_DLMOPEN)
FIRST(dlclose)
FIRST(dlerror)
FIRST(dlopen)
FIRST(dlsym)
FIRST(dlvsym)
FIRST(pthread_condattr_setpshared)
FIRST(pthread_create)
FIRST(pthread_detach)
FIRST(pthread_getspecific)
FIRST(pthread_join)
FIRST(pthread_key_create)
FIRST(pthread_key_delete)
FIRST(pthread_kill)
FIRST(pthread_mutex_trylock)
FIRST(pthread_mutexattr_destroy)
FIRST(pthread_mutexattr_init)
FIRST(pthread_mutexattr_setpshared)
FIRST(pthread_mutexattr_settype)
FIRST(pthread_once)
FIRST(pthread_rwlock_destroy)
FIRST(pthread_rwlock_init)
FIRST(pthread_rwlock_rdlock)
FIRST(pthread_rwlock_timedrdlock)
FIRST(pthread_rwlock_timedwrlock)
FIRST(pthread_rwlock_tryrdlock)
FIRST(pthread_rwlock_trywrlock)
FIRST(pthread_rwlock_unlock)
FIRST(pthread_rwlock_wrlock)
FIRST(pthread_rwlockattr_destroy)
FIRST(pthread_rwlockattr_init)
FIRST(pthread_rwlockattr_setpshared)
FIRST(pthread_setspecific)
FIRST(pthread_spin_destroy)
FIRST(pthread_spin_init)
FIRST(pthread_spin_lock)
FIRST(pthread_spin_trylock)
FIRST(pthread_spin_unlock)
FIRST(sem_destroy)
FIRST(sem_init)
FIRST(sem_post)
FIRST(sem_timedwait)
FIRST(sem_trywait)
FIRST(sem_wait)
FIRST(shm_open)
FIRST(shm_unlink)

#endif
