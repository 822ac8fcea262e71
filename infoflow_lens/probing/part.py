"""What `infoflow-lens probe` needs of a probe, in one object."""

import copy
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from infoflow_lens.foundation import packages
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.naming import nearest
from infoflow_lens.hooks import LayerCapabilities, ModelCapabilities, Probe, Result
from infoflow_lens.hooks.model.capabilities import name_layers
from infoflow_lens.hooks.model.inputs import Batches
from infoflow_lens.hooks.model.points import INSTEAD_OF_A_BRIDGE, config_value
from infoflow_lens.probing.config import (
    GROUP,
    PARTS,
    OwnSetting,
    ProbingConfig,
    apply_settings,
    check_settings,
    part_names,
    registered,
)
from infoflow_lens.runs.checkpoint import Checkpoint
from infoflow_lens.runs.executor import Executor

if TYPE_CHECKING:
    from infoflow_lens.report.charts import Chart


@dataclass(frozen=True)
class RunContext:
    """What a part needs for its measurement: settings, model, data, and earlier results.

    Attributes:
        config: the settings of the run.
        model: the loaded model.
        capabilities: what can be measured on the model, layer by layer.
        fingerprint: of the model's weights.
        batches: all sequences.
        progress: whether to show bars.
        executor: where probes run that can be spread over processes.
        found: the results of earlier parts, by name.
        n_processes: processes of this machine that measure probes at the same time.
    """

    config: ProbingConfig
    model: nn.Module
    capabilities: ModelCapabilities
    fingerprint: str
    batches: Batches
    progress: bool
    executor: Executor = field(default_factory=Executor)
    found: Mapping[str, Any] = field(default_factory=dict)
    n_processes: int = 1

    @property
    def detail(self) -> Batches:
        """The first sequences, for what takes long."""
        return self.batches.first(self.config.n_detail)

    def options(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the settings that all measures share, and how they go on."""
        return {
            "seed": self.config.seed,
            "batch_size": self.config.batch_size,
            "resume": checkpoint.load(),
            "after": checkpoint.take,
            "progress": self.progress,
        }

    @property
    def width(self) -> int:
        """d_model; 0 where the config does not say."""
        return int(config_value(self.model, "d_model") or 0)


def lack_of_heads(layer: LayerCapabilities) -> str:
    """Say why a layer shows no heads; empty if it does."""
    if layer.mixer:
        return f"it has no attention and runs {layer.mixer}"
    if layer.n_heads is None:
        return "it shows neither scores nor pattern; load it with eager attention"
    return ""


def where_lacking(
    capabilities: ModelCapabilities, lacking: Callable[[LayerCapabilities], str]
) -> str:
    """Say in which layers something is lacking, and why in the first; empty if in none."""
    reasons = [lacking(layer) for layer in capabilities.layers]
    layers = [layer for layer, reason in enumerate(reasons) if reason]
    if not layers:
        return ""
    return f"in {name_layers(layers)} of this {capabilities.kind}: {reasons[layers[0]]}"


class Part:
    """One kind of measurement of `infoflow-lens probe`, with its table, figures and sentences.

    A part either returns `probes`, which share forward passes with the probes of other parts, or
    measures by itself in `measure`.
    Other packages add parts through the entry points "infoflow_lens.probes"
    (examples/probe_of_your_own.py).

    Attributes:
        title, text: of its section in the report.
        sequences: the sequences that it reads: "all", or "detail", the first ``config.n_detail``.
        after: the parts whose results it reads, from ``context.found``; it is measured with them
            or not at all.
        reads: more parts whose results it reads, where they are measured.
        edits: the hook points whose edits must reach the output of every layer.
        next_token: whether it reads the loss of the next token, which language models alone have.
        by_default: whether it is measured where no probes are named.
        fixed: by the name of a probe, the settings that tables, figures or other parts build on,
            so that a run must not change them.
        kinds: the classes of which each of its probes may be, by its name, so that settings are
            refused before a model is loaded.
    """

    title: ClassVar[str] = ""
    text: ClassVar[str] = ""
    sequences: ClassVar[Literal["all", "detail"]] = "all"
    after: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    edits: ClassVar[tuple[str, ...]] = ()
    next_token: ClassVar[bool] = False
    by_default: ClassVar[bool] = True
    fixed: ClassVar[Mapping[str, Sequence[str]]] = {}
    kinds: ClassVar[Mapping[str, Sequence[type[Probe[Any]]]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Take what a class above says of its probes for those alone."""
        super().__init_subclass__(**options)
        if "probes" in vars(cls) and "kinds" not in vars(cls):
            cls.kinds = {}

    def check_settings(self, settings: Sequence[OwnSetting]) -> None:
        """Refuse settings of its probes so far as that needs no model.

        Raises:
            InfoFlowError: for what no class in `kinds` has or allows.
        """
        check_settings(settings, self.kinds, self.fixed)

    def lacking(self, layer: LayerCapabilities) -> str:
        """Say why this cannot be measured in a layer; empty if it can."""
        return ("" if layer.mixer else self.lost_edits(layer)) or lack_of_heads(layer)

    def lost_edits(self, layer: LayerCapabilities) -> str:
        """Say which of the edits that it makes do not reach the output; empty if all do."""
        lost = [point for point in self.edits if point not in layer.edits_reach]
        what = f"edits of {' and '.join(lost)} do not reach its output; {INSTEAD_OF_A_BRIDGE}"
        return what if lost else ""

    def lacking_of_data(self, context: RunContext) -> str:
        """Say why the sequences are too few, and what to give; empty if they are enough."""
        return ""

    def check(self, context: RunContext) -> None:
        """Refuse settings and models that this part cannot use, before any part begins.

        Raises:
            InfoFlowError: with the reason.
        """
        self.probes(context)

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return probes by the names of their results; none if the part measures by itself."""
        return {}

    def measure(self, context: RunContext, checkpoint: Checkpoint) -> Result | None:
        """Measure a part without probes, and keep the unfinished state in the checkpoint."""
        return None

    def table(self, result: Any) -> "pd.DataFrame":
        """Return the numbers, for a csv file."""
        frame: pd.DataFrame = result.to_frame()
        return frame

    def figures(self, result: Any) -> Sequence["Chart"]:
        """Return what its section of the report shows; without any it has no section.

        Charts of `infoflow_lens.report.charts` (HeatMap, NameMap, Lines, Table), heat maps over
        heads from a frame (`infoflow_lens.report.charts.by_head`), or figures of matplotlib. In the
        place of anything else the page shows the table. Default: the table.
        """
        from infoflow_lens.report.charts import Table

        return (Table.from_frame(self.table(result)),)

    def remarks(self, result: Any) -> str:
        """Say what a reader of its section must know; empty for nothing."""
        return ""

    def sentences(self, result: Any) -> Sequence[str]:
        """Return the sentences that the terminal shows; default, those of the result."""
        return result.sentences() if isinstance(result, Result) else ()

    def facts(self, result: Any) -> Sequence[tuple[str, str]]:
        """Return short statements for the head of the report, as (label, value)."""
        return ()


class ProbePart(Part):
    """A part made of a user's probe, whose docstring gives the title and the text."""

    def __init__(self, probe: Probe[Any], name: str | None = None) -> None:
        """Make the part.

        Args:
            probe: a probe that has seen nothing.
            name: of its result; default, made from the class and its settings.
        """
        self._probe = probe
        self.name = name_of(probe) if name is None else name
        self.kinds = {self.name: (type(probe),)}  # type: ignore[misc]
        first, _, rest = (inspect.getdoc(type(probe)) or self.name).partition("\n")
        self.title, self.text = first.rstrip("."), rest.strip()  # type: ignore[misc]

    def check_settings(self, settings: Sequence[OwnSetting]) -> None:
        """Refuse what the probe itself refuses, which may make of values what it needs."""
        apply_settings({self.name: self._probe}, settings, self.fixed)

    def check(self, context: RunContext) -> None:
        """Refuse a model that does not show what the probe reads, and an incomplete probe."""
        # on a copy, since a probe that is prepared has begun
        copy.deepcopy(self._probe).prepare(context.model)

    def lacking(self, layer: LayerCapabilities) -> str:
        """Say nothing: the probe itself says what it needs."""
        return ""

    def probes(self, context: RunContext) -> Mapping[str, Probe[Any]]:
        """Return a copy of the probe."""
        return {self.name: copy.deepcopy(self._probe)}

    def figures(self, result: Any) -> Sequence[Any]:
        """Return the plot of the result."""
        return (result.plot(),)


def name_of(probe: Probe[Any]) -> str:
    """Make a name for files and tables: of the class, with a digest of the settings, if any."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(probe).__name__).lower()
    config = json.dumps(dict(probe.config()), sort_keys=True)
    digest = hashlib.sha256(config.encode()).hexdigest()[:6]
    return words if config == "{}" else f"{words}-{digest}"


Say = Callable[[str], None]


def load_part(name: str) -> Part:
    """Return the part of that name.

    Raises:
        InfoFlowError: for an unknown name, or an entry point that is no part.
    """
    # parts of this call, then ours, then those of other packages
    if name in registered.get({}):
        return registered.get({})[name]
    if name in PARTS:
        made: Part = getattr(import_module("infoflow_lens.probing.parts"), PARTS[name])()
        return made
    others = packages.find_entry_points(GROUP, PARTS)
    if name not in others:
        raise InfoFlowError(f"there is no probe {name!r}{nearest(name, part_names())}")
    kind = packages.load_class(others[name], Part, Probe)
    try:
        part: Part = kind() if issubclass(kind, Part) else ProbePart(kind(), name)
    except Exception as error:
        raise InfoFlowError(
            f"{kind.__name__} of the entry point {name!r} cannot be made ({type(error).__name__}: "
            f"{error}): expected one without arguments; repair the package that adds it"
        ) from error
    return part
