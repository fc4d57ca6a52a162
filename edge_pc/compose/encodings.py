"""What is encoded together, what it attends to meanwhile, and the key that its KV states are stored under.

A module is encoded attending to its *guaranteed context*: all cells that are surely present whenever it is, that is the
text before it of the schema and of its enclosing modules. Siblings may be absent, so it does not see them: neutral text
stands in their positions while it is encoded, and is never stored. Members of a scaffold do see each other, in a joint
encoding that serves prompts which import all of them.

Because a module's own cells and its context are each in position order, and all of the context lies before it, an
encoding is plain causal prefill over past cells.

Where states can be moved to other positions, a key says nothing of the place: it holds positions as if only the neutral
text stood between a module and its context. One file's states then serve every place in every schema. A module is at
its place in the schema while it is encoded, or after it if there is no room for the neutral text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge_pc.backends.base import IntArray
from edge_pc.compose.choices import EncodingRule, Placeholder
from edge_pc.compose.schema_layout import ROOT, ModuleLayout, ScaffoldLayout, SchemaLayout
from edge_pc.errors import OptionError

# Exact versions whose keys are kept; there are as many as selections.
_KEPT_EXACT = 4096

_KEY_FORMAT = "edge-pc-states-2"


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """How schemas are encoded.

    Attributes:
        rule: `neutral`: guaranteed context, and neutral text in the place of modules that may stand before;
            `guaranteed` context only; or `isolated`: each module alone, as in the paper.
        placeholder: what stands in a parameter's slot while its module is encoded: `nothing` (a gap in the positions),
            `unk` tokens (the paper's choice), or the parameter's own `default` text (nothing where it has none).
        unk_id: the token for `unk`; None when the model has none.
        neutral_ids: the neutral text for `neutral`.
        max_positions: of the model.
        movable: states can be moved to other positions.
    """

    rule: EncodingRule
    placeholder: Placeholder
    unk_id: int | None
    neutral_ids: tuple[int, ...]
    max_positions: int
    movable: bool

    def __post_init__(self) -> None:
        if self.placeholder == "unk" and self.unk_id is None:
            raise OptionError("placeholder 'unk': this model has no <unk> token", hint="use placeholder 'nothing'")


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first `tokens` cells of an encoding."""

    encoding: Encoding
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """Modules whose own text is encoded in one run.

    Attributes:
        schema: the schema's name.
        paths: the modules, one unless a scaffold joins several; `ROOT` is the schema's anonymous text.
        stored: whether its states are kept; not if `cache="false"` stands at one of its modules.
        token_ids, position_ids: int32 `[n]`, of the run, placeholders included, positions ascending, as the key has
            them: with no gap before the run.
        keep: int32 indices into the run: the cells that are stored, all but placeholders.
        context: what the run attends to besides itself, in position order.
        key: hash over all that the states depend on.
        moved: by how many positions its place in the schema lies after the key's.
        lift: by how many positions after its place in the schema it is encoded.
    """

    schema: str
    paths: tuple[str, ...]
    stored: bool
    token_ids: IntArray
    position_ids: IntArray
    keep: IntArray
    context: tuple[Prefix, ...]
    key: str
    moved: int = 0
    lift: int = 0

    @property
    def label(self) -> str:
        """How people know it: its modules' paths, the anonymous text under the schema's name."""
        return " + ".join(path if path != ROOT else self.schema for path in self.paths)

    @property
    def outermost(self) -> str:
        """The name of the outermost module that it is in; of the anonymous text, empty."""
        return self.paths[0].partition("/")[0]

    @property
    def tokens(self) -> int:
        """The number of cells that are stored."""
        return len(self.keep)

    @property
    def kept_token_ids(self) -> IntArray:
        return self.token_ids[self.keep]

    @property
    def kept_position_ids(self) -> IntArray:
        """Where its cells are in the schema."""
        position_ids: IntArray = self.position_ids[self.keep] + np.int32(self.moved)
        return position_ids

    @property
    def run_position_ids(self) -> IntArray:
        """Where the run is while it is encoded."""
        position_ids: IntArray = self.position_ids + np.int32(self.moved + self.lift)
        return position_ids

    @property
    def encoded_position_ids(self) -> IntArray:
        """Where its cells are while they are encoded, and so in the file."""
        return self.run_position_ids[self.keep]


class SchemaEncodings:
    """The encodings of one schema for one model.

    Args:
        layout: the schema with its positions.
        identity: what the states depend on besides tokens and positions: the model's fingerprint and the KV layout.
        options: how to encode.
    """

    def __init__(self, layout: SchemaLayout, identity: tuple[str, ...], options: EncodingOptions) -> None:
        self._layout = layout
        self._identity = identity
        self._options = options
        self._scaffolds = self._applicable_scaffolds()
        self._made: dict[tuple[tuple[str, ...], bool], Encoding] = {}
        self._exact: dict[tuple[str, str, bytes], Encoding] = {}
        self._prefix_keys: dict[tuple[str, int], str] = {}
        depth = max(len(layout.ancestors(path)) for path in layout.modules)
        # Neutral text takes positions of its own, which the model must have.
        roomy = layout.length + depth * len(options.neutral_ids) <= options.max_positions
        # Alone with its guaranteed context, a module keeps its distance to it: to move it would change that.
        self._movable = options.movable and options.rule != "guaranteed" and roomy

    def of_prompt(self, modules: Collection[str]) -> list[Encoding]:
        """The encodings that serve a prompt which imports `modules`; text with `cache="false"` is in none of them."""
        return list(self._below(ROOT, frozenset(modules)))

    def of_schema(self) -> list[Encoding]:
        """The encodings to make in advance: each module's own, and a joint one for each scaffold and for all together.

        The only module of a schema with text after it has the joint encoding alone: it is imported or nothing is.
        """
        singles = [] if self._has_only_module() else [path for path in self._layout.modules if self._cached(path)]
        groups: list[tuple[str, ...]] = [(path,) for path in singles]
        for scope in dict.fromkeys(scaffold.scope for scaffold in self._scaffolds):
            here = [scaffold for scaffold in self._scaffolds if scaffold.scope == scope]
            choices = [[scaffold] for scaffold in here] + ([here] if len(here) > 1 else [])
            groups += [self._joined(scope, [m for scaffold in choice for m in scaffold.members]) for choice in choices]
        encodings = [self._encoding(group) for group in groups]
        return [encoding for encoding in encodings if encoding.tokens]

    def single(self, path: str) -> Encoding:
        """The encoding of one module alone."""
        return self._encoding((path,))

    def other_version(self, encoding: Encoding) -> Encoding:
        """The same cells as they are encoded where the outermost module has another place: right after its context if
        here other modules may stand between, else after neutral text. The encoding itself where there is no other."""
        if not self._movable or self._options.rule != "neutral":
            return encoding
        return self._encoding(encoding.paths, elsewhere=True)

    def exact(self, encodings: Sequence[Encoding], places: Sequence[IntArray], first_computed: int) -> list[Encoding]:
        """The same cells, each encoded after all those before it in this prompt: as full prefill has them.

        Only as many from the first on as nothing else comes in between: text that is computed for the prompt (from
        position `first_computed` on), or cells of one encoding among those of another. None where modules are to be
        isolated.

        Args:
            places: of each encoding's cells in the prompt.
        """
        if self._options.rule == "isolated":
            return []
        chain: list[Encoding] = []
        end = -1
        for encoding, positions in zip(encodings, places, strict=True):
            if not encoding.stored or positions[0] <= end or positions[-1] >= first_computed:
                break
            end = int(positions[-1])
            chain.append(self._after(chain, encoding, positions))
        return chain

    def _after(self, chain: Sequence[Encoding], encoding: Encoding, positions: IntArray) -> Encoding:
        """The encoding made again after all of `chain`; the last one's key tells all of it."""
        known = (chain[-1].key if chain else "", encoding.key, positions.tobytes())
        if known not in self._exact:
            if len(self._exact) == _KEPT_EXACT:
                self._exact.clear()
            self._exact[known] = self._made_after(chain, encoding, positions)
        return self._exact[known]

    def _made_after(self, chain: Sequence[Encoding], encoding: Encoding, positions: IntArray) -> Encoding:
        context = tuple(Prefix(before, before.tokens) for before in chain)
        token_ids, keep = encoding.kept_token_ids, np.arange(encoding.tokens, dtype=np.int32)
        key = self._key(token_ids, positions, keep, context)
        return replace(
            encoding, token_ids=token_ids, position_ids=positions, keep=keep, context=context, key=key, moved=0, lift=0
        )

    def _below(self, path: str, present: frozenset[str]) -> Iterator[Encoding]:
        group = self._group(path, present)
        if self._cached(path):
            encoding = self._encoding(group)
            if encoding.tokens:
                yield encoding
        for child, module in self._layout.modules.items():
            if child in present and child not in group and module.parent in group:
                yield from self._below(child, present)

    def _group(self, path: str, present: frozenset[str]) -> tuple[str, ...]:
        """`path` and the modules that scaffolds join to it, given which modules are present."""
        joined: list[str] = []
        for scaffold in self._scaffolds:
            if scaffold.scope == path and present.issuperset(scaffold.members):
                for member in scaffold.members:
                    joined += self._group(member, present)
        return self._joined(path, joined)

    def _joined(self, scope: str, members: list[str]) -> tuple[str, ...]:
        return (scope, *dict.fromkeys(members))

    def _encoding(self, group: tuple[str, ...], elsewhere: bool = False) -> Encoding:
        """The encoding of the modules in `group`; see `other_version` for `elsewhere`."""
        if (group, elsewhere) not in self._made:
            self._made[group, elsewhere] = self._make(group, elsewhere)
        return self._made[group, elsewhere]

    def _make(self, group: tuple[str, ...], elsewhere: bool) -> Encoding:
        cells = sorted(cell for path in group for cell in self._cells(self._layout.modules[path]))
        start = cells[0][0] if cells else 0
        above = self._above(group[0], start, elsewhere)
        stand_in, moved, lift = self._stand_in(group[0], start, above, elsewhere)
        first = start - moved - len(stand_in)
        cells = [
            *((position, token, False) for position, token in enumerate(stand_in, first)),
            *((position - moved, token, kept) for position, token, kept in cells),
        ]
        position_ids = np.array([position for position, _, _ in cells], dtype=np.int32)
        token_ids = np.array([token for _, token, _ in cells], dtype=np.int32)
        keep = np.array([index for index, (_, _, kept) in enumerate(cells) if kept], dtype=np.int32)
        context = tuple(prefix for prefix in above if prefix.tokens)
        key = self._key(token_ids, position_ids, keep, context)
        stored = all(self._cached(path) for path in group)
        return Encoding(self._layout.name, group, stored, token_ids, position_ids, keep, context, key, moved, lift)

    def _cells(self, module: ModuleLayout) -> Iterator[tuple[int, int, bool]]:
        """(position, token, whether it is stored) of a module's own text and of what stands in its slots."""
        for token, position in zip(module.token_ids.tolist(), module.position_ids.tolist(), strict=True):
            yield position, token, True
        for slot in module.slots:
            placeholder: tuple[int, ...] = ()
            if self._options.placeholder == "default":
                placeholder = slot.default_ids or ()
            elif self._options.placeholder == "unk" and self._options.unk_id is not None:
                placeholder = (self._options.unk_id,) * slot.length
            for position, token in enumerate(placeholder, slot.start):
                yield position, token, False

    def _above(self, path: str, start: int, elsewhere: bool) -> list[Prefix]:
        """The enclosing modules' cells before position `start`: the guaranteed context, some of it maybe empty."""
        if self._options.rule == "isolated":
            return []
        above = [self._encoding((ancestor,), elsewhere) for ancestor in self._layout.ancestors(path)]
        return [Prefix(each, int(np.searchsorted(each.kept_position_ids, start))) for each in above]

    def _stand_in(
        self, path: str, start: int, above: Sequence[Prefix], elsewhere: bool
    ) -> tuple[tuple[int, ...], int, int]:
        """The neutral text that stands before `start`, and what the encoding is `moved` and lifted by."""
        last, moved, lift = -1, 0, 0  # of the last cell or slot of the context
        for prefix in above:
            module = self._layout.modules[prefix.encoding.paths[0]]
            ends = [slot.start + slot.length - 1 for slot in module.slots if slot.start < start]
            end = max(ends + prefix.encoding.kept_position_ids[: prefix.tokens][-1:].tolist(), default=-1)
            if end > last:
                last, moved, lift = end, prefix.encoding.moved, prefix.encoding.lift
        room = start - 1 - last
        outermost = self._layout.modules[path].parent == ROOT
        neutral = self._options.rule == "neutral" and (room > 0) != (elsewhere and outermost)
        token_ids = self._options.neutral_ids if neutral else ()
        if not self._movable:
            return token_ids[-room:] if room else (), 0, 0
        return token_ids, moved + room - len(token_ids), lift + max(len(token_ids) - room, 0)

    def _key(self, token_ids: IntArray, position_ids: IntArray, keep: IntArray, context: tuple[Prefix, ...]) -> str:
        """Hash of a run and of everything it attends to, chained through the contexts' own.

        Of a context only the part that is attended to counts: an edit after it changes nothing here.
        """
        digest = hashlib.blake2b(digest_size=20)
        for part in (_KEY_FORMAT, *self._identity):
            digest.update(part.encode() + b"\0")
        for above in context:
            digest.update(f"context {self._prefix_key(above)}\0".encode())
        for array in (token_ids, position_ids, keep):
            digest.update(f"{len(array)}\0".encode() + array.astype("<i4").tobytes())
        return digest.hexdigest()

    def _prefix_key(self, prefix: Prefix) -> str:
        """The key of what is attended to of an encoding. Kept: it is part of the key of every module further inside."""
        encoding, tokens = prefix.encoding, prefix.tokens
        known = (encoding.key, tokens)
        if known not in self._prefix_keys:
            stop = int(encoding.keep[tokens - 1]) + 1
            cells = (encoding.token_ids[:stop], encoding.position_ids[:stop], encoding.keep[:tokens])
            self._prefix_keys[known] = self._key(*cells, encoding.context)
        return self._prefix_keys[known]

    def _cached(self, path: str) -> bool:
        return self._layout.modules[path].cache

    def _has_only_module(self) -> bool:
        return any(scaffold.scope == ROOT and not scaffold.name for scaffold in self._scaffolds)

    def _applicable_scaffolds(self) -> tuple[ScaffoldLayout, ...]:
        """The declared scaffolds, or one around the only module of a schema and the text after it, which may see it:
        nothing else can be there or not."""
        declared = self._layout.scaffolds
        paths = [path for path in self._layout.modules if path != ROOT]
        if declared or len(paths) != 1 or not self._cached(paths[0]) or self._options.rule == "isolated":
            return tuple(scaffold for scaffold in declared if self._cached(scaffold.scope))
        text_end = self._layout.modules[ROOT].position_ids.max(initial=-1)
        only = ScaffoldLayout("", ROOT, (paths[0],))
        return (only,) if text_end > self._layout.modules[paths[0]].start else ()
