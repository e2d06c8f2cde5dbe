// Keeps the library loadable by glibc 2.28, whichever newer glibc it is linked against.
//
// The linker binds each function to the newest version that it finds. Here that would be exp, log
// and pow of glibc 2.29, which differ from the older ones only in that they never call a handler of
// errors, and a flag of glibc 2.32, which libstdc++ reads to skip atomic instructions in a program
// of one thread. setup.py links with --wrap of each of the three, so that their calls arrive here.

#if defined(__linux__) && defined(__GNUC__) && (defined(__x86_64__) || defined(__aarch64__))

#if defined(__x86_64__)
#define FIRST_VERSION "GLIBC_2.2.5"
#else
#define FIRST_VERSION "GLIBC_2.17"
#endif

__asm__(".symver first_exp, exp@" FIRST_VERSION);
__asm__(".symver first_log, log@" FIRST_VERSION);
__asm__(".symver first_pow, pow@" FIRST_VERSION);

extern "C" {

double first_exp(double);
double first_log(double);
double first_pow(double, double);

double __wrap_exp(double x) { return first_exp(x); }
double __wrap_log(double x) { return first_log(x); }
double __wrap_pow(double x, double y) { return first_pow(x, y); }

// False: there may be several threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

}  // extern "C"

#endif
