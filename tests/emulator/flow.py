"""Where control and values go: which block follows which, and which registers are read later."""

from __future__ import annotations

from tests.emulator.ptx import Address, Block, Instruction, Kernel, Operand, TensorAddress


def successors(kernel: Kernel, block: Block) -> list[int]:
    """The blocks that may follow one."""
    end = block.instructions[-1] if block.instructions else None
    following = [block.number + 1] if block.number + 1 < len(kernel.blocks) else []
    if end is None:
        return following
    if end.name == "bra":
        return [kernel.labels[str(end.operands[0])], *(following if end.guard else [])]
    if end.name == "brx":
        return [kernel.labels[x] for x in kernel.tables[str(end.operands[1])]]
    if end.name in ("ret", "exit"):
        return following if end.guard else []
    return following


def order_of_execution(kernel: Kernel) -> list[int]:
    """A rank of each block, such that threads that have parted meet again where their ways do.

    Those with the lowest rank go on, and a block has a higher rank than all from which it is reached: what
    follows a loop has a higher one than what is in it. Edges back to the head of a loop do not count.
    """
    edges = {block.number: successors(kernel, block) for block in kernel.blocks}
    ranks: dict[int, int] = {}
    _rank({*edges}, edges, ranks)
    return [ranks[block.number] for block in kernel.blocks]


def polls(kernel: Kernel) -> bool:
    """Whether there is a loop in which a thread may wait for another's store: one with a strong read."""
    edges = {block.number: successors(kernel, block) for block in kernel.blocks}
    reads = {
        block.number
        for block in kernel.blocks
        if any(
            (i.name == "ld" and {"acquire", "relaxed", "volatile"} & {*i.modifiers})
            or (i.name == "atom" and {"cas", "exch", "or"} & {*i.modifiers})
            for i in block.instructions
        )
    }
    loops = [x for x in _components({*edges}, edges) if len(x) > 1 or any(b in edges[b] for b in x)]
    return any(reads & loop for loop in loops)


def _rank(blocks: set[int], edges: dict[int, list[int]], ranks: dict[int, int]) -> None:
    """Ranks some blocks, loop by loop."""
    for component in _components(blocks, edges):
        if len(component) > 1:
            outside = [b for b in edges if b not in component]
            heads = {t for b in outside for t in edges[b] if t in component} or {min(component)}
            inner = {b: [t for t in edges[b] if t not in heads] for b in component}
            _rank(component, inner, ranks)
        else:
            ranks[next(iter(component))] = len(ranks)


def _components(blocks: set[int], edges: dict[int, list[int]]) -> list[set[int]]:
    """Strongly connected components, each before those that are reached from it.

    Blocks that were left last in a walk along the edges come first; a walk against them from each takes what
    leads to it (Kosaraju's algorithm).
    """
    left: list[int] = []
    seen: set[int] = set()
    for start in sorted(blocks):
        path = [] if start in seen else [(start, iter(edges[start]))]
        seen.add(start)
        while path:
            block, targets = path[-1]
            for target in targets:
                if target in blocks and target not in seen:
                    seen.add(target)
                    path.append((target, iter(edges[target])))
                    break
            else:
                path.pop()
                left.append(block)

    sources: dict[int, list[int]] = {block: [] for block in blocks}
    for block in blocks:
        for target in edges[block]:
            if target in blocks:
                sources[target].append(block)

    components: list[set[int]] = []
    taken: set[int] = set()
    for start in reversed(left):
        if start in taken:
            continue
        component, ahead = set(), [start]
        while ahead:
            block = ahead.pop()
            if block not in taken:
                taken.add(block)
                component.add(block)
                ahead += sources[block]
        components.append(component)
    return components


def registers_of(operand: Operand) -> list[str]:
    """The registers that an operand names, without the machine's own."""
    if isinstance(operand, Address):
        names = [operand.base]
    elif isinstance(operand, TensorAddress):
        names = [operand.base, *operand.coordinates]
    elif isinstance(operand, tuple):
        names = list(operand)
    else:
        names = operand.split("|")
    return [x for x in (name.lstrip("!-") for name in names) if x.startswith("%") and not is_special(x)]


SPECIAL = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid")


def is_special(name: str) -> bool:
    return name.split(".")[0] in SPECIAL or name.startswith("%envreg")


# Instructions that write no register, by the beginnings of their names with modifiers.
_WRITE_NOTHING = (
    *("st.", "stmatrix", "bra", "brx", "bar", "ret", "exit", "red.", "fence", "membar", "cp.", "prefetch"),
    *("wgmma.fence", "wgmma.commit", "wgmma.wait", "mbarrier.init", "mbarrier.inval"),
    *("call", "trap"),
)


def written(instruction: Instruction) -> list[str]:
    """The registers that an instruction writes."""
    name = ".".join((instruction.name, *instruction.modifiers))
    if name.startswith("st.param"):  # of a call, whose parameters are registers here
        return registers_of(instruction.operands[0])
    if name.startswith(_WRITE_NOTHING) or not instruction.operands:
        return []
    return registers_of(instruction.operands[0])


def read(instruction: Instruction) -> list[str]:
    """What it reads: under a guard also what it writes, which stays where the guard is false."""
    results = written(instruction)
    operands = instruction.operands[1:] if results else instruction.operands
    names = [name for operand in operands for name in registers_of(operand)]
    if instruction.name == "wgmma":
        names += results
    if instruction.guard:
        names += [instruction.guard[0], *results]
    return names


def alive_after(kernel: Kernel) -> list[set[str]]:
    """The registers whose values at the end of each block may be read later."""
    used: list[set[str]] = []
    made: list[set[str]] = []
    for block in kernel.blocks:
        uses: set[str] = set()
        makes: set[str] = set()
        for instruction in block.instructions:
            uses |= set(read(instruction)) - makes
            if not instruction.guard:
                makes |= set(written(instruction))
        used.append(uses)
        made.append(makes)

    before: list[set[str]] = [set() for _ in kernel.blocks]
    after: list[set[str]] = [set() for _ in kernel.blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(kernel.blocks):
            at = block.number
            after[at] = set().union(*(before[s] for s in successors(kernel, block)))
            now = used[at] | (after[at] - made[at])
            changed |= now != before[at]
            before[at] = now
    return after


def registers_of_products(kernel: Kernel) -> set[str]:
    """The registers that may hold the result of an asynchronous product, and so those that it is moved to."""
    instructions = [i for block in kernel.blocks for i in block.instructions]
    found = {x for i in instructions if i.name == "wgmma" for x in written(i)}
    moves = [i for i in instructions if i.name == "mov" and found]
    while more := {x for i in moves if found & {*read(i)} for x in written(i)} - found:
        found |= more
    return found
