"""The parts fusions are made of, as patterns.

    gated       residual + gate * branch, the gate plain or through tanh
    added       residual + branch
    modulated   norm * (1 + scale) + shift, norm * scale + shift, norm + norm * scale + shift, or without the shift

A product and its sum may be one `addcmul`.  What the names they bind must satisfy is asked in questions.py.
"""

from __future__ import annotations

from graphopt.passes.norms import norm_of
from graphopt.passes.pattern import Again, Bound, Const, Op, Pattern, Var


def gate() -> Pattern:
    """A gate, or tanh of one (possibly viewed afterwards)."""
    activated = Op("tanh", Var("gate").cast(), bind="activated", side=True)
    return activated.views("gate").cast() | Var("gate").cast()


def gated(branch: Pattern | None = None) -> Pattern:
    """residual + gate * branch, operands in any order, casts anywhere."""
    branch, residual = branch or Var("branch").cast(), Var("residual").cast()
    product = Op("mul", branch, gate(), bind="gated")
    return Op("add", residual, product.cast(), bind="sum") | Op("addcmul", residual, branch, gate(), bind="sum")


def normed_branch() -> Pattern:
    """A branch that is a norm."""
    return norm_of(Var("branch"), prefix="branch_").cast()


def added() -> Pattern:
    """residual + branch."""
    return Op("add", Var("residual").cast(), Var("branch").cast(), bind="sum")


def modulated(norm: Pattern) -> Pattern:
    """norm * gain (+ shift), where the gain is `1 + scale` (possibly viewed after the addition) or a plain scale."""
    n, again = norm.cast(), Again("result").cast()
    scale, shift = Var("scale").cast(), Var("shift").cast()
    one_plus = Op("add", scale, Const(1), bind="gain", side=True)
    gain = one_plus.views("scale").cast() | scale
    product = Op("mul", n, gain, bind="product")
    times = Op("mul", again, scale).cast()
    implied = Op("add", n, times, bind="implied") | Op("addcmul", n, again, scale, bind="implied")
    scaled = product | Bound(implied, "product")
    return (
        Op("add", scaled.cast(), shift, bind="shifted") | Op("addcmul", shift, n, gain, bind="shifted") | scaled
    )
