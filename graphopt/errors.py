"""Every error graphopt raises.  A message says what happened, where in the user's code, and what to do about it."""

from __future__ import annotations


class GraphoptError(Exception):
    """Base of all errors of graphopt.

    Args:
        what: one sentence, what went wrong.
        where: the place in the user's code or the object concerned, if there is one.
        remedy: what the reader can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        parts = [what]
        if where:
            parts.append(f"  where: {where}")
        if remedy:
            parts.append(f"  remedy: {remedy}")
        super().__init__("\n".join(parts))


class ConfigError(GraphoptError):
    """An option is unknown or has a value that cannot be used."""


class PassOrderError(GraphoptError):
    """A pass runs without what it requires, or beside one it conflicts with."""


class RewriteError(GraphoptError):
    """A rule would have produced, or has produced, an invalid graph."""


class RuleError(RewriteError):
    """A registered rule's replacement has another shape or dtype than what it replaces.

    Raised before the graph is changed, whatever `on_error` says: the rule is wrong everywhere.
    """


class VerifyError(GraphoptError):
    """A rewritten site differs from fp64 by more than its limit."""


class CodegenError(GraphoptError):
    """A kernel could not be generated or compiled for a target."""


class PlanInfeasible(GraphoptError):
    """No plan meets the limits; the message names the limit, by how much, and the samples."""


class StreamError(GraphoptError):
    """A model or an optimizer cannot be streamed as asked."""


class CheckpointError(GraphoptError):
    """A checkpoint cannot be written, is cut short, or belongs to another model or job."""


class UnsupportedTorch(GraphoptError):
    """This version of torch lacks something graphopt relies on."""


def unwrap(error: BaseException) -> BaseException:
    """Ours out of torch's: follow `BackendCompilerFailed` and exception chains to the first `GraphoptError`.

    Returns `error` itself when there is none.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        e = todo.pop(0)
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        if isinstance(e, GraphoptError):
            return e
        todo += [getattr(e, "inner_exception", None), e.__cause__, e.__context__]
    return error
