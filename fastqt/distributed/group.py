"""A group of processes and how they hold a batch."""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.checks import check_option, shown
from fastqt.devices import memory_of
from fastqt.options import Edges, Exchange, GroupGradients, RankCheck, ShardSizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SHARDS: tuple[str, ...] = get_args(ShardSizes)
EDGES: tuple[str, ...] = get_args(Edges)
GRADIENTS: tuple[str, ...] = get_args(GroupGradients)
EXCHANGES: tuple[str, ...] = get_args(Exchange)
CHECKS: tuple[str, ...] = get_args(RankCheck)
# The environment variable that sets another default of `Group(check=)`.
CHECK_VARIABLE = "FASTQT_CHECK_RANKS"
RETURN_DTYPES = (torch.float32, torch.bfloat16)
# Of a device's memory, what all ranks' candidates and their gradients may take before "auto" chooses a ring.
GATHERED_SHARE = 1 / 8


class Group:
    """The processes whose rows make up one batch, and how they hold it.

    The batch is the concatenation of the ranks' rows in the order of their ranks in the group. Each rank
    calls the loss with its own rows and gets the loss of the whole batch. A `Group` does not keep the process
    group: after `destroy_process_group()` the losses raise a RuntimeError. A copied module has the same
    `Group`; a pickled one has that of all processes where it is loaded. No other group can be pickled.

    Args:
        process_group: of torch.distributed; by default all processes.
        shards: "equal": every rank has as many rows as the others, at every call. "uneven": the numbers are
            exchanged at every call, for which a GPU's host waits; a rank may have no rows.
        edges: "join": the batch is one text, and windows of neighbours reach over the edges of shards; "cut":
            windows stop there, as where ranks read separate texts.
        gradients: "average": gradients are right once they are averaged over the ranks, as DDP and FSDP do;
            "sum": once they are added up.
        exchange: "gather": every rank holds all candidates; "ring": one other rank's at a time, for which a
            softmax takes eight matrix products in place of six; "auto": "gather" where it fits an eighth of
            the memory, and under torch.compile.
        return_dtype: what the candidates' gradients travel in, torch.float32 or torch.bfloat16; they are
            added up in float32. float64 stays float64 unless it is torch.bfloat16.
        check: "first": the ranks compare a call when it is first made, with the values of scale and bias that
            are numbers. "always": they compare each call, the values of tensors too, and what they are about
            to do before each exchange, so that ranks out of step raise the same ValueError. That is for
            finding errors: it waits for the device at every call, and torch.compile refuses it. By default
            what the environment variable FASTQT_CHECK_RANKS says, otherwise "first".

    Raises:
        ValueError: an unknown option, or this process is not in the group.
        TypeError: process_group is no process group and no mesh.
        RuntimeError: torch.distributed is not initialised.

    Example:
        A group of this process alone; under `torchrun`, `dist.init_process_group()` joins all of them.

        >>> import torch, torch.distributed as dist, fastqt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> group = fastqt.distributed.Group(shards="uneven")
        >>> group.rank, group.size
        (0, 1)
        >>> fastqt.info_nce_loss(*torch.randn(2, 8, 16), group=group).shape  # over the rows of all ranks
        torch.Size([])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        process_group: ProcessGroup | DeviceMesh | None = None,
        *,
        shards: ShardSizes = "equal",
        edges: Edges = "join",
        gradients: GroupGradients = "average",
        exchange: Exchange = "auto",
        return_dtype: torch.dtype = torch.float32,
        check: RankCheck | None = None,
    ) -> None:
        check_option("shards", shards, SHARDS)
        check_option("edges", edges, EDGES)
        check_option("gradients", gradients, GRADIENTS)
        check_option("exchange", exchange, EXCHANGES)
        if return_dtype not in RETURN_DTYPES:
            raise ValueError(f"return_dtype: want torch.float32 or torch.bfloat16, got {shown(return_dtype)}")

        chosen = check if check is not None else os.environ.get(CHECK_VARIABLE) or "first"
        check_option("check" if check is not None else CHECK_VARIABLE, chosen, CHECKS)
        found = _process_group("process_group", process_group)

        # Weak, as torch.distributed keeps process groups until they are destroyed. One that lived on in a
        # module or cache would end with Python, when a thread of Gloo that waits for the interpreter aborts.
        self._process_group = weakref.ref(found)
        self._is_default = found is dist.distributed_c10d._get_default_group()
        self.shards, self.edges, self.gradients = shards, edges, gradients
        self.exchange, self.return_dtype, self.check = exchange, return_dtype, chosen
        self.rank, self.size = dist.get_rank(found), dist.get_world_size(found)
        if self.rank < 0:
            raise ValueError(
                f"group: want one that holds this process, rank {dist.get_rank()} of all, got another"
            )

        # By what a call is, without its sizes: the sizes that this rank gave when all ranks agreed on it.
        self.agreed: dict[Any, tuple[int, ...]] = {}
        self.function = "a loss"
        self._of_functions: dict[str, Group] = {}
        # Each rank's machine, once the ranks have told each other.
        self.machines: list[str] = []

    def __repr__(self) -> str:
        return (
            f"Group(rank {self.rank} of {self.size}, shards={self.shards!r}, edges={self.edges!r}, "
            f"gradients={self.gradients!r}, exchange={self.exchange!r}, return_dtype={self.return_dtype}, "
            f"check={self.check!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # A copy of a module talks to the same processes.

    def __copy__(self) -> Group:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it is loaded, it is a group of all processes there, as DDP's is."""
        if not self._is_default:
            raise TypeError(
                f"group: want one of all processes to pickle, got {self} of another process group; "
                "save the module's state_dict(), and make the module with a group where that is loaded"
            )
        return _all_processes, (self.options(), self.function)

    @property
    def process_group(self) -> ProcessGroup:
        """The process group of torch.distributed.

        Raises:
            RuntimeError: it was destroyed.
        """
        found = self._process_group()
        if found is None:
            raise RuntimeError("group: want one that exists, got one that destroy_process_group() has ended")
        return found

    def options(self) -> dict[str, Any]:
        """The options, by name."""
        names = ("shards", "edges", "gradients", "exchange", "return_dtype", "check")
        return {name: getattr(self, name) for name in names}

    def of_function(self, function: str) -> Group:
        """This group as calls of a public function use it, whose errors name the function."""
        found = self._of_functions.get(function)
        if found is None:
            found = self._of_functions[function] = copy.copy(self)
            found.function = function
            found._of_functions = {}
        return found

    def uneven(self) -> Group:
        """This group for a part of its rows, of which each rank may have another number."""
        twin = copy.copy(self)
        twin.shards, twin._of_functions = "uneven", {}
        return twin

    @property
    def node_size(self) -> int:
        """How many ranks each machine has in a row, where all have as many; otherwise the group's size."""
        runs = [len(list(run)) for _, run in itertools.groupby(self.machines)]
        return runs[0] if len(set(runs)) == 1 else self.size

    @property
    def factor(self) -> int:
        """What a rank's part of a gradient is multiplied by, so that the ranks' reduction makes it whole."""
        return self.size if self.gradients == "average" else 1

    def takes_ring(self, rows: int, like: Tensor) -> bool:
        """Whether so many candidates in all, which are like `like`, visit one rank's after the other's.

        Raises:
            ValueError: a ring under torch.compile.
        """
        if torch.compiler.is_compiling():
            if self.exchange == "ring":
                raise ValueError("exchange: want 'auto' or 'gather' under torch.compile, got 'ring'")
            return False
        if self.exchange != "auto":
            return self.exchange == "ring"
        needed = rows * like[:1].numel() * (like.element_size() + max(4, like.element_size()))
        return needed > GATHERED_SHARE * memory_of(like.device)


def _all_processes(options: dict[str, Any], function: str) -> Group:
    """The group of all processes, which a pickled one is where it is loaded."""
    group = Group(**options)
    return group if function == group.function else group.of_function(function)


GroupLike: TypeAlias = "Group | ProcessGroup | DeviceMesh"
# The classes of `GroupLike` that this torch has.
GROUPS: tuple[type, ...] = (
    (Group, dist.ProcessGroup, dist.device_mesh.DeviceMesh) if dist.is_available() else (Group,)
)

# The groups that were made of process groups, which agree on a loss once and not at every call.
_made: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


def as_group(group: GroupLike) -> Group:
    """What a user passes as `group=`, as a `Group`.

    Raises:
        TypeError: none of them, or under torch.compile no `Group`.
        ValueError: a mesh of several dimensions, or a group that this process is not in.
        RuntimeError: torch has no torch.distributed, or that is not initialised.
    """
    if isinstance(group, Group):
        return group
    if torch.compiler.is_compiling():  # What a Group keeps would be lost after the graph was traced.
        raise TypeError("group: want a fastqt.distributed.Group under torch.compile, got another")
    process_group = _process_group("group", group)
    made = _made.get(process_group)
    if made is None:
        made = _made[process_group] = Group(process_group)
    return made


def is_ring(group: GroupLike | None) -> bool:
    """Whether ranks always visit each other's candidates in a ring."""
    return group is not None and as_group(group).exchange == "ring"


def _process_group(name: str, group: Any) -> ProcessGroup:
    if not dist.is_available():
        raise RuntimeError(f"{name}: want a torch that has torch.distributed, got one without")
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or outside or isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh))):
        advice = "; all processes are torch.distributed.group.WORLD" if isinstance(group, str) else ""
        raise TypeError(
            f"{name}: want a Group, a ProcessGroup or a DeviceMesh, got {type(group).__name__}{advice}"
        )

    if not dist.is_initialized():
        raise RuntimeError(f"{name}: want torch.distributed initialised first, by init_process_group")
    if outside:
        raise ValueError(
            f"{name}: want one that holds this process, rank {dist.get_rank()} of all, got another"
        )

    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{name}: want a mesh of one dimension, such as mesh['dp'], got {group.ndim} dimensions"
            )
        return group.get_group()
    return dist.distributed_c10d._get_default_group() if group is None else group
