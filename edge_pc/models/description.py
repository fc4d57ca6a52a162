"""What of a model deals with text, and its sizes: all that is known of it without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_pc.compose.chat import TEMPLATE_FILE
from edge_pc.models.spec import ModelSpec
from edge_pc.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A model's spec, tokenizer, and the source of its chat template if it has one."""

    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: str | None


def describe(folder: Path) -> Description:
    """Describe the exported model in `folder`.

    Raises:
        ModelError: the folder is no exported model, or a file of it is broken.
    """
    template = folder / TEMPLATE_FILE
    return Description(
        ModelSpec.load(folder),
        Tokenizer.load(folder),
        template.read_text(encoding="utf-8") if template.is_file() else None,
    )
