"""What a prompt reuses of stored states, and how close that comes to full prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edge_pc.checks import check_choice

Fidelity = Literal["fast", "balanced", "full"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
DEFAULT_FIDELITY: Fidelity = "balanced"

# The reason why a module's states were not reused: the wanted fidelity asks for its tokens themselves.
COMPUTED = "computed with the prompt"


@dataclass(frozen=True, slots=True)
class Serving:
    """What a prompt reuses, and how.

    Attributes:
        use_cache: False: full prefill, nothing reused and nothing stored.
        fidelity: how close reuse comes to full prefill. `fast`: stored states as they are. `balanced`: of modules that
            were encoded without what stands before them here, the tokens that matter for this prompt are computed
            again. `full`: all of such modules is computed again, and sums are added up in the order of full prefill:
            without gaps in the positions the result is equal bit for bit.
        strict: a module that is not stored is an error.

    Raises:
        OptionError: `fidelity` is not known.
    """

    use_cache: bool = True
    fidelity: Fidelity = DEFAULT_FIDELITY
    strict: bool = False

    def __post_init__(self) -> None:
        check_choice("fidelity", self.fidelity, FIDELITIES)
