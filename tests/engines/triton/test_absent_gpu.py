"""All that Python does for a loss on a GPU, gradients too, with a GPU that is not there.

Tensors are torch's fake ones, which know their device, dtype and shape and hold nothing: an operation that
mixes devices is an error as on a GPU, and so is one whose result would have to be waited for. A process runs
this that has loaded what devices.cpp makes before torch, and in which Triton does not interpret.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.cpp_extension import include_paths, library_paths

import fastqt
from fastqt import Diagonal, Mixed, smoothed
from fastqt.engines import ops
from fastqt.engines.cuda import contrastive as small
from fastqt.engines.triton import clip
from fastqt.kernels import launch
from fastqt.problem import ClipProblem, ClipSide, Needs
from tests.csrc.building import MODULE, build, compiler
from tests.shared.launches import GPUS, Launch, standing_in
from tests.shared.processes import printed

RUN = """
import ctypes, importlib, sys
ctypes.CDLL(sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wants Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a library for CUDA devices"),
]
GPU = next(gpu for gpu in GPUS if gpu.arch == 90)
D = 64
FREE_MEMORY = 48 * 2**20  # half of which is too little for all rows at once, of 4,096
SMALL_KERNEL, DESCRIPTORS = "small_contrastive_", "a kernel with descriptors"
SCALING, KEPT = "scale_gradients_kernel", "nothing, but kept gradients"
FUNCTIONS = [f for f in Function.__subclasses__() if f.__module__.startswith("fastqt.")]
# A fake tensor is of a subclass of Tensor, as a tracer's is, which goes other ways.
ASK_FOR_TRACERS = [
    m for name, m in sys.modules.items() if name.startswith("fastqt.") and hasattr(m, "is_traced")
]


@dataclass
class Given:
    """Makes what a loss is given on the GPU, and keeps what wants a gradient."""

    N: int
    dtype: torch.dtype
    leaves: list[Tensor] = field(default_factory=list)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.leaves.append(torch.empty(shape, dtype=dtype or self.dtype, device="cuda", requires_grad=True))
        return self.leaves[-1]

    def embeddings(self, count: int) -> list[Tensor]:
        return [self.leaf(self.N, D) for _ in range(count)]

    def number(self) -> Tensor:
        return self.leaf(dtype=torch.float32)

    def ids(self) -> Tensor:
        return torch.empty(self.N, dtype=torch.int64, device="cuda")

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.N, self.N, dtype=dtype, device="cuda")


Loss = Callable[..., Tensor]  # of what is given, reduction and memory


def of_views(function: Callable[..., Tensor], count: int = 2, **options: Any) -> Loss:
    return lambda given, **how: function(*given.embeddings(count), **options, **how)


def contrastive(given: Given, **how: Any) -> Tensor:
    return fastqt.contrastive_loss(*given.embeddings(2), **how)


def with_negatives(function: Callable[..., Tensor], given: Given, **how: Any) -> Tensor:
    queries, candidates, negatives = given.embeddings(3)
    return function(queries, candidates, negatives=negatives, **how)


def with_guide(given: Given, margin: float, **how: Any) -> Tensor:
    guide = fastqt.Guide(*of_another_model(given), margin=margin)
    return contrastive(given, exclude=guide, **how)


def of_another_model(given: Given) -> list[Tensor]:
    return [torch.empty(given.N, 48, dtype=given.dtype, device="cuda") for _ in range(2)]


def gist(given: Given, **how: Any) -> Tensor:
    guides = dict(zip(("guide_anchors", "guide_positives"), of_another_model(given), strict=True))
    return fastqt.gist_embed_loss(*given.embeddings(2), **guides, **how)


def bags_of_words(given: Given, **how: Any) -> Tensor:
    words, V = torch.empty(10 * given.N, dtype=torch.int64, device="cuda"), 5000
    decoder = given.leaf(V, D), given.leaf(V)
    return fastqt.gloss_bow_loss(given.leaf(given.N, D), *decoder, words, given.ids(), **how)


class Rectangle(Function):
    """The sums of a rectangle's rows, with the gradients that its cells have from rows and columns."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, scale: Tensor, pairs: int, memory: str | int, reduction: str
    ) -> Tensor:
        of_cosines = a.dtype is not torch.float16
        ctx.p = ClipProblem(a.detach(), b.detach(), scale.detach(), memory, of_cosines, pairs)
        ctx.sums = clip.sums(ctx.p)
        rows = ctx.sums.row_others.float()
        return rows if reduction == "none" else rows.mean()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        sides = (ClipSide(x, torch.ones_like(x)) for x in ctx.sums[1:])
        found = clip.gradients_from(ctx.p, *sides, ctx.sums.positive, Needs(True, True, scale=True))
        assert found.scale is not None
        return found.queries, found.candidates, found.scale.float(), None, None, None


def rectangle(given: Given, pairs: bool, reduction: str, memory: str | int) -> Tensor:
    sides = given.leaf(given.N, D), given.leaf(given.N + 1000, D)
    return Rectangle.apply(*sides, given.number(), given.N if pairs else 0, memory, reduction)


released = partial(of_views, fastqt.mixcse_loss, form="released")

PREFIXES = (16, 32, 64)
RANKING = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")

LOSSES: dict[str, Loss] = {
    "contrastive": contrastive,
    "normalized": of_views(fastqt.contrastive_loss, normalize=True, scale=20.0),
    "documents": lambda given, **how: contrastive(given, document_ids=given.ids(), **how),
    "class indices": lambda given, **how: contrastive(given, targets=given.ids(), diagonal="keep", **how),
    "groups": lambda given, **how: contrastive(given, exclude=fastqt.Same(given.ids(), given.ids()), **how),
    "mask": lambda given, **how: contrastive(given, exclude=given.matrix(torch.bool), **how),
    "guide": partial(with_guide, margin=0.1),
    "GISTEmbed": gist,
    "mixed": of_views(fastqt.contrastive_loss, row_negatives=Mixed()),
    "mixed with partners": lambda given, **how: contrastive(
        given, row_negatives=Mixed(0.2, given.ids()), **how
    ),
    "row scores": lambda given, **how: contrastive(given, row_scores=given.leaf(given.N), **how),
    "dense": lambda given, **how: contrastive(given, targets=given.matrix(given.dtype), **how),
    "dense with row scores": lambda given, **how: contrastive(
        given, targets=given.matrix(given.dtype), row_scores=given.leaf(given.N), **how
    ),
    "distances": of_views(fastqt.contrastive_loss, diagonal="exclude", similarity="euclidean"),
    "smoothed": of_views(fastqt.contrastive_loss, targets=smoothed(Diagonal()), diagonal="keep"),
    "learnt scale": lambda given, **how: contrastive(given, scale=given.number(), **how),
    "learnt scale and biases": lambda given, **how: contrastive(
        given, scale=given.number(), bias=given.leaf(given.N), **how
    ),
    "GLOSS, bags of words": bags_of_words,
    "negatives": partial(with_negatives, fastqt.contrastive_loss),
    "InfoNCE with negatives": partial(with_negatives, fastqt.info_nce_loss),  # of cosines
    "prefixes": of_views(fastqt.info_nce_loss, matryoshka=PREFIXES),
    "prefixes of CLIP": of_views(fastqt.clip_loss, scale=20.0, matryoshka=PREFIXES),
    "SimCSE": of_views(fastqt.simcse_loss),
    "SimCSE with hard negatives": of_views(fastqt.simcse_loss, 3, hard_negative_weight=0.3),
    "ranking in all directions": of_views(
        lambda a, b, c, **how: fastqt.multiple_negatives_ranking_loss(
            *(a, [b, c]), directions=RANKING, hardness_mode="hard_negatives", hardness_strength=5.0, **how
        ),
        3,
    ),
    "ranking of queries too": of_views(fastqt.multiple_negatives_ranking_loss, directions=RANKING[:2]),
    "CLIP": of_views(fastqt.clip_loss, scale=20.0),
    "CLIP, learnt scale": lambda given, **how: fastqt.clip_loss(
        *given.embeddings(2), scale=given.number(), **how
    ),
    "rectangle of CLIP": partial(rectangle, pairs=True),
    "rectangle of CLIP without pairs": partial(rectangle, pairs=False),
    "SigLIP": lambda given, **how: fastqt.siglip_loss(
        *given.embeddings(2), scale=given.number(), bias=given.number(), **how
    ),
    "MixCSE": of_views(fastqt.mixcse_loss),
    "MixCSE, mixtures learnt": of_views(fastqt.mixcse_loss, stop_gradient=False),
    "MixCSE released": released(),
    "MixCSE released, candidates": released(blocks="candidates"),
    "MixCSE released, excluded": released(masked_cell="exclude"),
    "MixCSE released, mixtures learnt": released(stop_gradient=False, hard_negative_weight=0.4),
}
OF_EVERY_DTYPE = (
    *("contrastive", "mixed", "dense", "learnt scale and biases"),
    *("CLIP", "rectangle of CLIP", "SigLIP", "MixCSE released"),
)
SMALL = (
    *("contrastive", "documents", "class indices", "mixed", "mixed with partners", "learnt scale"),
    *("SimCSE", "CLIP, learnt scale", "MixCSE", "MixCSE, mixtures learnt"),
)
CAPTURED = (*OF_EVERY_DTYPE, "InfoNCE with negatives", "SimCSE with hard negatives", "MixCSE")


@dataclass(frozen=True)
class Problem:
    loss: Loss
    N: int
    dtype: torch.dtype = torch.bfloat16
    memory: str | int = "fast"
    reduction: str = "mean"
    captured: bool = False  # in a CUDA graph
    # Whether they read the operands of the scores' product; None: as the engine chooses.
    descriptors: bool | None = False
    small: bool = False  # the kernel for small problems is built, and takes it


def problems() -> dict[str, Problem]:
    found: dict[str, Problem] = {}

    def add(name: str, *p: Any, **more: Any) -> None:
        made = Problem(*p, **more)
        words = [name, f"N={made.N}", str(made.dtype)[6:], str(made.memory), made.reduction]
        words += [word for word in ("captured", "descriptors", "small") if getattr(made, word)]
        found[", ".join(words)] = made

    ways = list(product([torch.bfloat16], ("fast", "low"), ("mean", "none")))
    for name, loss in LOSSES.items():
        for N, way in [*product([13], ways[1:3]), *product([4096], ways[::3])]:
            add(name, loss, N, *way)
    for name, dtype in product(OF_EVERY_DTYPE, (torch.float16, torch.float32)):
        for N, memory in ((13, "low"), (4096, "fast")):
            add(name, LOSSES[name], N, dtype, memory)
    for name in OF_EVERY_DTYPE:
        add(name, LOSSES[name], 4096, memory=2**24)
    for name in CAPTURED:
        add(name, LOSSES[name], 4096, captured=True)
    for name in ("contrastive", "CLIP", "SigLIP"):
        add(name, LOSSES[name], 4096, descriptors=True)
    for name, reduction, captured in product(SMALL, ("mean", "none"), (False, True)):
        add(name, LOSSES[name], 13, reduction=reduction, captured=captured, small=True)
    return found


class OnGpu(FakeTensorMode):
    """Fake tensors, and no copies between GPU and host, which waits for them and no graph can hold."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        if any(word in function.overloadpacket.__name__ for word in ("copy", "index")):
            devices = {x.device.type for x in tree_leaves((args, out)) if isinstance(x, Tensor)}
            assert len(devices) == 1, f"{function}: a copy between {' and '.join(sorted(devices))}"
        return out


def check_argument(name: str, value: Any) -> None:
    """That a kernel takes it: a tensor on the GPU or a number."""
    value = getattr(value, "base", value)  # of a tensor descriptor
    if isinstance(value, Tensor):
        assert isinstance(value, FakeTensor), f"{name}: a tensor that was made elsewhere"
        assert value.device.type == "cuda", f"{name}: a tensor on {value.device}"
    else:
        assert value is None or isinstance(value, (bool, int, float)), f"{name}: {value!r}"


def check_launch(launch: Launch) -> None:
    name = launch.kernel.__name__
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        what = f"{name}: {parameter.name}"
        if parameter.is_constexpr:
            assert not isinstance(value, Tensor), f"{what}: a tensor for a constant"
        else:
            check_argument(what, value)
    assert 0 < launch.programs < 2**31, f"{name}: {launch.programs} programs"


def check_alike(x: Tensor, y: Tensor) -> None:
    wanted, found = ((t.device.type, t.dtype, tuple(t.shape)) for t in (x, y))
    assert found == wanted, f"want {wanted}, got {found}"


def checked(function: type[Function], launched: set[str]) -> Iterator[tuple[type[Function], str, Any]]:
    """What to replace of a function: autograd would convert gradients of other dtypes without a word."""
    genuine_forward, genuine_backward = function.forward, function.backward

    def forward(ctx: Any, *inputs: Any) -> Any:
        ctx.given = inputs
        out = genuine_forward(ctx, *inputs)
        if getattr(ctx, "in_forward", False):
            launched.add(KEPT)
        return out

    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradients = genuine_backward(ctx, *upstream)
        for x, gradient in zip(ctx.given, gradients, strict=True):
            if gradient is not None:
                check_alike(x, gradient)
        return gradients

    yield function, "forward", staticmethod(forward)
    yield function, "backward", staticmethod(backward)


@contextlib.contextmanager
def absent_gpu(p: Problem, say: Callable[[Launch], object] | None = None) -> Iterator[set[str]]:
    """Fake tensors can be on it; its launches are checked and not made, and their kernels' names are kept.

    `say` is told of each launch, in place of the checks of what autograd functions return.
    """
    launched: set[str] = set()
    made_current: list[Any] = []  # devices, by those who launch there or ask about one

    @contextlib.contextmanager
    def device(x: Any) -> Iterator[None]:
        made_current.append(x)
        yield
        made_current.pop()

    def capturing() -> bool:
        assert made_current, "a question about the current device, which need not be the tensors'"
        return p.captured

    def tf32_allowed() -> bool:
        assert p.dtype is torch.float32, "a question for the precision of float32, which does not matter here"
        return True

    def note(made: Launch) -> None:
        assert made_current, f"{made.kernel.__name__}: a launch on the current device"
        check_launch(made)
        launched.add(made.kernel.__name__)
        if say is not None:
            say(made)
        if made.constants.get("DESCRIPTORS"):
            launched.add(DESCRIPTORS)

    def small_contrastive(*arguments: Any) -> None:
        for place, value in enumerate(arguments):
            check_argument(f"{SMALL_KERNEL}: argument {place}", value)
        launched.add(SMALL_KERNEL)

    def asked_for_memory(*_: Any) -> tuple[int, int]:
        assert not p.captured, "a question for the free memory, which a graph is not to depend on"
        return FREE_MEMORY, 80 * 2**30

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_current_stream_capturing", capturing),
        (torch.cuda, "mem_get_info", asked_for_memory),
        (torch.cuda, "memory_reserved", lambda _: 0),
        (torch.cuda, "memory_allocated", lambda _: 0),
        *((module, "tf32_allowed", tf32_allowed) for module in (small, launch)),
        (ops, "cuda_error", None if p.small else "it is not built"),
        (torch.ops.fastqt, SMALL_KERNEL, SimpleNamespace(default=small_contrastive)),
        *((module, "is_traced", lambda *_: False) for module in ASK_FOR_TRACERS),
        *(one for function in (FUNCTIONS if say is None else ()) for one in checked(function, launched)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new, create=name == SMALL_KERNEL))
        stack.enter_context(standing_in(GPU, p.descriptors, note))
        stack.enter_context(mock.patch.object(torch.cuda, "device", device))
        # Another one than the tensors', so that every launch has to make theirs the current one.
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=1))
        stack.enter_context(OnGpu())
        yield launched


def check(p: Problem) -> None:
    given = Given(p.N, p.dtype)
    with absent_gpu(p) as launched:
        loss = p.loss(given, reduction=p.reduction, memory=p.memory)
        shape = (p.N,) if p.reduction == "none" else ()
        check_alike(torch.empty(shape, device="cuda"), loss)
        gradients = torch.autograd.grad(loss, given.leaves, torch.ones_like(loss))
        for x, g in zip(given.leaves, gradients, strict=True):
            check_alike(x, g)
    assert launched, "nothing was launched"
    wanted = KEPT in launched and not p.small
    assert (SCALING in launched) == wanted, "torch multiplies by an upstream gradient that may be 1"
    assert (SMALL_KERNEL in launched, DESCRIPTORS in launched) == (p.small, p.descriptors), launched


def error_of(p: Problem) -> str | None:
    try:
        check(p)
    except Exception as error:  # whatever it is, the test of this problem fails with it
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    # Modes belong to a thread, and autograd would have one for each device.
    torch.autograd.set_multithreading_enabled(False)
    known = problems()
    print(json.dumps({name: error_of(known[name]) for name in json.load(sys.stdin)}))


def printed_by(module: str, given: str = "") -> str:
    """What `main` of a module prints, with Triton not interpreting, where standard input is what is given."""
    flags = ["-std=c++20", "-fPIC", *(f"-isystem{x}" for x in include_paths())]
    paths = [option for path in library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    library = build(
        {"tests/csrc/cuda/absent/devices.cpp": flags},
        headers=(),
        link=[*MODULE, *paths, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"],
        versions=[torch.__version__],
    )
    return printed("-c", RUN, str(library), module, given=given)


@pytest.fixture(scope="module")
def errors(request):
    """The error of each problem that is tested by its name, or None. A process of its own finds them."""
    tests = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in tests]
    found = json.loads(printed_by("tests.engines.triton.test_absent_gpu", json.dumps(names)))
    assert list(found) == names
    return found


@pytest.mark.parametrize("name", problems())
@pytest.mark.thinned(8)
def test_nothing_mixes_devices_or_waits(errors, name):
    assert errors[name] is None, errors[name]
