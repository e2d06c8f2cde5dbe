"""A loss module equals its function with the options fixed."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist

import fastqt
from fastqt import nn
from fastqt.nn import ContrastiveLoss

N, D = 9, 4
GENERATOR = torch.Generator().manual_seed(0)
QUERIES, CANDIDATES, OTHERS = (torch.randn(N, D, generator=GENERATOR) for _ in range(3))
BIAS = torch.randn(N, generator=GENERATOR)
IDS = torch.arange(N) // 5
TOKENS = torch.randint(N, (N, 3), generator=GENERATOR)

# Module, function, options, positional and keyword arguments of a batch.
MODULES = {
    "contrastive": (
        nn.ContrastiveLoss,
        fastqt.contrastive_loss,
        {"context_size": 2, "scale": 3.0, "normalize": True, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS, "negatives": OTHERS, "bias": BIAS},
    ),
    "sigmoid": (
        nn.SigmoidLoss,
        fastqt.sigmoid_loss,
        {"scale": 3.0, "diagonal": "exclude", "memory": "low"},
        (QUERIES, CANDIDATES),
        {"mask": torch.eye(N).roll(4, 0).bool(), "bias": -1.0},
    ),
    "info_nce": (
        nn.InfoNCELoss,
        fastqt.info_nce_loss,
        {"normalize": False, "scale": 2.0, "label_smoothing": 0.2},
        (QUERIES, CANDIDATES),
        {"negatives": OTHERS},
    ),
    "simcse": (
        nn.SimCSELoss,
        fastqt.simcse_loss,
        {"hard_negative_weight": 1.5},
        (QUERIES, CANDIDATES, OTHERS),
        {},
    ),
    "ranking": (
        nn.MultipleNegativesRankingLoss,
        fastqt.multiple_negatives_ranking_loss,
        {
            **{"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
            **{"hardness_mode": "all_negatives", "hardness_strength": 3.0},
        },
        (QUERIES, CANDIDATES),
        {},
    ),
    "mixcse": (
        nn.MixCSELoss,
        fastqt.mixcse_loss,
        {"form": "released", "mix": 0.4, "reduction": "sum"},
        (QUERIES, CANDIDATES),
        {},
    ),
    "clip": (nn.CLIPLoss, fastqt.clip_loss, {"scale": 5.0, "normalize": False}, (QUERIES, CANDIDATES), {}),
    "siglip": (
        nn.SigLIPLoss,
        fastqt.siglip_loss,
        {"scale": 5.0, "bias": -2.0, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {},
    ),
    "max_margin": (
        nn.MaxMarginLoss,
        fastqt.max_margin_loss,
        {"margin": 0.5, "reduction": "sum"},
        (QUERIES, CANDIDATES),
        {"document_ids": torch.arange(len(QUERIES)) // 3},
    ),
    "binary_window": (
        nn.BinaryWindowLoss,
        fastqt.binary_window_loss,
        {"context_size": 2, "reduction": "none"},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS},
    ),
    "negative_sampling": (
        nn.NegativeSamplingLoss,
        fastqt.negative_sampling_loss,
        {"scale": 2.0, "reduction": "sum"},
        (QUERIES, CANDIDATES, TOKENS[:, 0], TOKENS),
        {},
    ),
    "curl": (nn.CURLLoss, fastqt.curl_loss, {"reduction": "sum"}, (QUERIES, CANDIDATES, OTHERS), {}),
    "curl_block": (
        nn.CURLBlockLoss,
        fastqt.curl_block_loss,
        {"negatives": "complement", "context_size": 2},
        (QUERIES, CANDIDATES),
        {"document_ids": IDS},
    ),
    "gloss_bow": (
        nn.GlossBagOfWordsLoss,
        fastqt.gloss_bow_loss,
        {"reduction": "sum"},
        (QUERIES, CANDIDATES, BIAS, TOKENS.flatten(), torch.arange(0, 3 * N, 3)),
        {},
    ),
    "gloss_pos": (
        nn.GlossPositionalLoss,
        fastqt.gloss_pos_loss,
        {"reduction": "none"},
        (QUERIES, OTHERS[:3], CANDIDATES, BIAS, TOKENS),
        {"lengths": torch.arange(N) % 4},
    ),
    "supcon": (
        nn.SupConLoss,
        fastqt.supcon_loss,
        {"scale": 5.0, "reduction": "none"},
        (QUERIES, IDS),
        {"candidates": CANDIDATES, "candidate_labels": IDS.flip(0)},
    ),
    "ntxent": (nn.NTXentLoss, fastqt.ntxent_loss, {"normalize": False, "memory": "low"}, (QUERIES, IDS), {}),
}
each = pytest.mark.parametrize("name", MODULES)


@each
def test_module_equals_its_function(name):
    make, function, options, data, named = MODULES[name]
    assert torch.equal(make(**options)(*data, **named), function(*data, **named, **options))


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_share_no_parameters(name, copied):
    make, _, options, data, named = MODULES[name]
    module = make(**options)
    twin = copied(module)
    assert repr(twin) == repr(module)
    assert torch.equal(twin(*data, **named), module(*data, **named))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


@each
def test_default_parameters_are_those_of_the_paper(name):
    make, _, options, _, _ = MODULES[name]
    learnt = {"clip": ["log_scale"], "siglip": ["log_scale", "bias"]}
    assert list(make(**options).state_dict()) == learnt.get(name, [])


@each
def test_unknown_or_misplaced_option_raises(name):
    make, _, options, data, named = MODULES[name]
    with pytest.raises(TypeError, match=rf"^temperature: no option of {make.__name__}$"):
        make(**options, temperature=0.05)
    for argument in named:
        with pytest.raises(TypeError, match=f"^{argument}: no option of"):
            make(**options, **{argument: named[argument]})
    with pytest.raises(TypeError, match=r"^reduction: want it when .* is made, not in a call$"):
        make(**options)(*data, **named, reduction="mean")


# What no function takes for an option of this name.
WRONG = {
    "backend": "cudnn",
    "bias": "none",
    "blocks": "first",
    "context_size": 0,
    "diagonal": "none",
    "directions": ("query_to_doc", "up"),
    "form": "paper",
    "group": "all",
    "hard_negative_weight": float("nan"),
    "hardness_mode": "soft",
    "hardness_strength": -1.0,
    "label_smoothing": 1.5,
    "margin": float("inf"),
    "masked_cell": "keep",
    "memory": "none",
    "mix": 1.5,
    "negatives": "hard",
    "normalize": "no",
    "partition_mode": "each",
    "partner": "last",
    "reduction": "avg",
    "samples": 0,
    "scale": 0.0,
    "similarity": "cosine",
    "stop_gradient": "no",
}


@each
def test_a_wrong_option_is_refused_when_the_module_is_made(name):
    """With the words of the function, but for flags, which functions take for true."""
    make, function, options, data, named = MODULES[name]
    for option in make._defaults():
        with pytest.raises((ValueError, TypeError), match=f"^{option}.*: want .*|^size") as at_construction:
            make(**{**options, option: WRONG[option]})
        if option not in ("normalize", "stop_gradient"):
            with pytest.raises((ValueError, TypeError)) as in_call:
                function(*data, **named, **{**options, option: WRONG[option]})
            if option not in ("backend", "bias"):
                assert str(at_construction.value) == str(in_call.value)


@pytest.fixture
def process_group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_modules_take_a_group(process_group):
    """Copies talk to the same processes, and a state dict knows nothing of them."""
    for make, function, options, data, named in MODULES.values():
        module = make(**options, group=process_group)
        wanted = function(*data, **named, **options)
        assert torch.allclose(module(*data, **named), wanted, rtol=1e-6)
        twin = copy.deepcopy(module)
        assert twin.options["group"] is module.options["group"]
        assert twin.options["group"].process_group is process_group
        assert module.state_dict() == make(**options).state_dict()
        assert "group=Group(rank 0 of 1, " in repr(module)


@pytest.mark.parametrize("model", [nn.SimCSE, nn.MixCSE])
def test_models_pass_a_group_to_their_loss(process_group, model):
    made = model(nn.BagOfWords(N, D), group=process_group)
    assert copy.deepcopy(made).loss.options["group"].process_group is process_group


def test_a_group_is_checked_when_a_module_is_made(process_group):
    with pytest.raises(
        ValueError, match="group: want one that holds this process, rank 0 of all, got another"
    ):
        nn.CLIPLoss(group=dist.GroupMember.NON_GROUP_MEMBER)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    with pytest.raises(ValueError, match="group: want a mesh of one dimension"):
        nn.SimCSELoss(group=mesh)
    assert nn.SimCSELoss(group=mesh["data"]).options["group"].size == 1


def test_a_group_wants_torch_distributed_initialised():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"group: want torch\.distributed initialised first"):
        nn.SimCSELoss(group=group)


def test_flags_of_modules_are_bools():
    for flags in ({"learn_scale": "no"}, {"learn_bias": 1}):
        with pytest.raises(TypeError, match=r"^learn_.*: want True or False"):
            nn.SigLIPLoss(**flags)


@pytest.mark.parametrize("name", ["curl", "curl_block", "gloss_bow", "gloss_pos"])
def test_losses_of_unscaled_scores_take_no_scale(name):
    with pytest.raises(TypeError, match=r"^learn_scale, scale: no option of"):
        MODULES[name][0](scale=2.0, learn_scale=True)


@pytest.mark.parametrize(
    "name", ["contrastive", "sigmoid", "info_nce", "simcse", "mixcse", "clip", "siglip", "ranking"]
)
def test_gradient_of_log_scale_equals_finite_difference(name):
    """d loss / d log scale = scale * d loss / d scale, compared with a central difference of the function."""
    make, function, options, data, named = MODULES[name]
    options = {**options, "reduction": "sum"}
    data = [x.double() for x in data]
    named = {k: x.double() if x is OTHERS or x is BIAS else x for k, x in named.items()}
    module = make(**{**options, "scale": 2.0}, learn_scale=True).double()
    module(*data, **named).backward()
    up, down = (
        function(*data, **named, **{**options, "scale": 2.0 * math.exp(step)}) for step in (1e-5, -1e-5)
    )
    assert module.log_scale.grad.item() == pytest.approx((up - down).item() / 2e-5, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (nn.ContrastiveLoss, 1.0),
        (nn.SigmoidLoss, 1.0),
        (nn.InfoNCELoss, 20.0),
        (nn.SimCSELoss, 20.0),
        (nn.MultipleNegativesRankingLoss, 20.0),
        (nn.MixCSELoss, 20.0),
        (nn.CLIPLoss, 1 / 0.07),
        (nn.SigLIPLoss, 10.0),
    ],
)
def test_default_scale(make, scale):
    assert torch.as_tensor(make().scale).item() == pytest.approx(scale)


def test_repr_shows_the_options():
    module = ContrastiveLoss(context_size=2, scale=3.0, normalize=True, reduction="none")
    assert repr(module) == "ContrastiveLoss(scale=3.0, context_size=2, normalize=True, reduction='none')"
    assert repr(nn.SigLIPLoss(learn_bias=False)) == "SigLIPLoss(scale=10.0, learn_scale=True, bias=-10.0)"
    assert repr(nn.CURLLoss()) == "CURLLoss()"


def test_learnt_scale_grows_when_queries_equal_their_candidates():
    """If queries equal their candidates, only a larger scale lowers the loss."""
    module = ContrastiveLoss(scale=2.0, learn_scale=True, diagonal="keep", normalize=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = module(QUERIES, QUERIES, fastqt.Diagonal())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert module.scale > 2.5
    assert list(module.state_dict()) == ["log_scale"]


def test_siglip_bias_is_learnt_and_restored_from_a_state_dict():
    """If all embeddings are equal, all scores are, and the optimal probability of a pair is 1 / N."""
    module = nn.SigLIPLoss(scale=1.0, learn_scale=False)
    ones = torch.ones(N, D)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(200):
        optimizer.zero_grad()
        module(ones, ones).backward()
        optimizer.step()
    assert torch.sigmoid(1 + module.bias).item() == pytest.approx(1 / N, abs=1e-3)
    fresh = nn.SigLIPLoss(scale=1.0, learn_scale=False)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(QUERIES, CANDIDATES), module(QUERIES, CANDIDATES))


@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_learnt_scale_is_clamped_as_clip_does_it(rate):
    """The steps of an optimiser with momentum are those of a parameter that is clamped after each step."""
    module = nn.InfoNCELoss(scale=4.0, learn_scale=True, max_scale=5.0)
    clamped = torch.nn.Parameter(torch.tensor(math.log(4.0)))
    optimizer = torch.optim.SGD([module.log_scale], lr=rate, momentum=0.9)
    of_clamped = torch.optim.SGD([clamped], lr=rate, momentum=0.9)
    found = []
    for step in range(12):
        candidates = QUERIES if step < 6 else -QUERIES  # The scale first wants to grow, and then to shrink.
        optimizer.zero_grad()
        of_clamped.zero_grad()
        penalty = module.log_scale**2  # whose graph has saved the parameter
        (module(QUERIES, candidates) + 0 * penalty).backward()
        fastqt.info_nce_loss(QUERIES, candidates, scale=clamped.exp()).backward()
        optimizer.step()
        of_clamped.step()
        with torch.no_grad():
            clamped.clamp_(max=math.log(5.0))
        found.append(module.scale.item())
        assert torch.equal(module.scale, clamped.exp())
        assert torch.equal(module.log_scale, clamped)
    assert max(found) == pytest.approx(5.0)
    assert found[-1] < 4.9


def test_max_scale_of_modules():
    assert nn.CLIPLoss().max_scale == 100.0
    assert nn.InfoNCELoss(learn_scale=True).max_scale is None
    assert repr(nn.SimCSELoss(learn_scale=True, max_scale=30.0)) == (
        "SimCSELoss(scale=20.0, learn_scale=True, max_scale=30.0)"
    )
    with pytest.raises(ValueError, match=r"scale: want at most max_scale=100\.0, got 200"):
        nn.CLIPLoss(scale=200)
    with pytest.raises(ValueError, match="max_scale: want a positive number, got 0"):
        nn.InfoNCELoss(learn_scale=True, max_scale=0)
    with pytest.raises(TypeError, match="max_scale: want a number, got str"):
        nn.InfoNCELoss(learn_scale=True, max_scale="100")


def test_a_clamped_scale_compiles_into_one_graph():
    module = nn.CLIPLoss(scale=4.0)
    with torch.no_grad():
        module.log_scale.fill_(math.log(500.0))
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(QUERIES, CANDIDATES).backward()
    twin(QUERIES, CANDIDATES).backward()
    assert module.scale.item() == pytest.approx(100.0)
    torch.testing.assert_close(module.log_scale.grad, twin.log_scale.grad)


def test_module_compiles_into_one_graph():
    module = nn.CLIPLoss()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(QUERIES, CANDIDATES), module(QUERIES, CANDIDATES))


def test_invalid_option_raises():
    with pytest.raises(TypeError, match="temperature: no option"):
        ContrastiveLoss(temperature=0.05)
    with pytest.raises(ValueError, match="scale: want a positive number"):
        ContrastiveLoss(scale=-1.0, learn_scale=True)
    with pytest.raises(ValueError, match="scale: want a finite number"):
        ContrastiveLoss(scale=float("inf"))
    with pytest.raises(ValueError, match="bias: want a finite number"):
        nn.SigLIPLoss(bias=float("nan"))
