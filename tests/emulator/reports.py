"""What the emulator has to say of a kernel: each thing once for each instruction that does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """Something that a GPU would not tell, or would stop at.

    Attributes:
        kind: "bounds", "alignment", "uninitialised", "race", "values", "pending", "proxy", "mbarrier" or
            "divergence".
        kernel: its name.
        line: of the source, as the compiler gave it.
        instruction: its text.
        details: of the first time.
    """

    kind: str
    kernel: str
    line: str
    instruction: str
    details: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.kernel}, {self.line}: {self.instruction}: {self.details}"


class Reports:
    """Reports in the order in which they came, with how many threads each is about."""

    def __init__(self) -> None:
        self.count: Counter[Report] = Counter()

    def add(self, report: Report, threads: int = 1) -> None:
        self.count[report] += threads

    def __iter__(self) -> Iterator[Report]:
        return iter(self.count)

    def __len__(self) -> int:
        return len(self.count)

    def kinds(self) -> set[str]:
        return {report.kind for report in self}

    def __str__(self) -> str:
        return "\n".join(f"{report} ({threads} threads)" for report, threads in self.count.items())
