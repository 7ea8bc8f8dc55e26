"""What a pass did, as plain data: sites, rejects, kernels, and the record of one pass over one graph.

A *site* is one modulate or one gate.  It is *rewritten*, or *declined* (faster left to Inductor, with both predicted
times).  A place that looked like a site and is not one is a *reject* with its reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# of a rule that a user registered, the kind is the rule's name
Kind = Literal["modulate", "gate"] | str


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one site in one training step (or one forward), in microseconds."""

    graphopt_us: float
    inductor_us: float


@dataclass(frozen=True)
class Traffic:
    """Predicted bytes between the GPU and its memory for one direction of a kernel: fused, and op by op as in eager."""

    fused: int
    op_by_op: int


@dataclass(frozen=True)
class Site:
    """One modulate or one gate.

    `fqn` is the owning module, `node` the last node of the chain in the graph as captured, `where` the user's source
    line, `shape` the activation's (sizes that are symbolic as text), `reason` why it was declined, `norms` the modules
    whose norms it covers.
    """

    kind: Kind
    rule: str
    fqn: str
    node: str
    where: str | None
    shape: tuple[int | str, ...]
    dtype: str
    status: Literal["rewritten", "declined"]
    reason: str | None = None
    predicted: Prediction | None = None
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reject:
    """A place that looked like a site of `rule` and was left alone, with the reason."""

    rule: str
    fqn: str
    node: str
    reason: str
    where: str | None


@dataclass(frozen=True)
class NearMiss:
    """A norm that is not modulated, or a sum with a product in it that is no gate, with the reason.

    kind: the site it would be.  Most are no failure: a norm in front of attention has no scale to take in.
    """

    kind: Kind
    fqn: str
    node: str
    reason: str
    where: str | None


@dataclass(frozen=True)
class Kernel:
    """One operator call in the rewritten graph and the sites it covers; one entry per direction.

    `node` is the call in the rewritten graph, `replaced` the nodes of the graph before that are gone for it, `placed`
    the ones that came, `sources` the files of its generated kernels in the kernel cache (none for the reference
    operators), `resources` what each takes on the target, `traffic` its bytes.
    """

    operator: str
    rule: str
    direction: Literal["forward", "backward"]
    sites: tuple[Site, ...]
    node: str = ""
    replaced: tuple[str, ...] = ()
    placed: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Checked:
    """What `graphopt.verify` saw of one operator call: the tensor that came closest to its limit, or went over it.

    Errors are relative L2 against fp64; `eager_error` is that of the ops it replaces.
    """

    key: str
    tensor: str
    error: float
    eager_error: float
    limit: float
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Within the limit?"""
        return self.failure is None and self.error <= self.limit

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        return (f"{self.tensor} differs from fp64 by {self.error:.2e}, the limit is {self.limit:.2e} "
                f"(the ops it replaces: {self.eager_error:.2e})")


@dataclass
class PassRecord:
    """What one pass did to one graph (graphs nested in it included)."""

    name: str
    nodes_before: int
    nodes_after: int = 0
    milliseconds: float = 0.0
    sites: list[Site] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    verified: list[Checked] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)
