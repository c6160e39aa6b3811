"""The composition: spec -> sites -> plan -> passes -> compiled program -> records.

The one module that knows every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, final

from torch import fx, nn

from fxcapture import _torch
from fxcapture.errors import SpecTypeError, TraceError
from fxcapture.inspect.drawing.draw import draw
from fxcapture.plan.inputs import input_finder
from fxcapture.plan.printing import Printed
from fxcapture.plan.records import Captured, Records
from fxcapture.plan.resolve import canonical_selection
from fxcapture.plan.sites import SiteTable
from fxcapture.runtime.dynamo import DynamoProgram
from fxcapture.runtime.explain import explain
from fxcapture.runtime.functional import collector
from fxcapture.runtime.model_outputs import inject_declared
from fxcapture.runtime.recording import CallRecording, Keep, taken_by
from fxcapture.runtime.refusals import refuse_arguments, refuse_eager
from fxcapture.runtime.watched_methods import delegate, watched
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.declared_spec import declared_records
from fxcapture.spec.flags import selections
from fxcapture.spec.positions import as_chosen
from fxcapture.spec.selector import Selector
from fxcapture.trace.method_entry import as_module

__all__ = ["CapturedModule", "compile"]


def compile(
    model: nn.Module | Callable[..., Any],
    spec: CaptureSpec | Mapping[str, Any] | None = None,
    *,
    keep_output: bool = True,
    regions: Any = None,
    on_eager: Literal["allow", "error"] = "allow",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    max_variants: int = 32,
    **torch_compile_kwargs: Any,
) -> CapturedModule:
    """Compile a model together with a capture spec.

    Example::

        spec = CaptureSpec({"hidden": Tap("layers.*", select=[0, -2])})
        captured = compile(model, spec, fullgraph=True)
        output, records = captured(input_ids)

    Args:
        model: The model, or a method of it (``model.encode_image``): the call of that
            then is what is compiled, and the root of the paths.  It is not changed.
        spec: What to capture; a mapping is made into a :class:`CaptureSpec`.  ``None``:
            what the model declares with ``_can_record_outputs``; the records then stand
            in the returned output object as well, where it has such fields, and the
            keywords ``output_<record>`` of a call select positions, without a trace.
        keep_output: With ``False`` the caller wants the records alone: the program ends
            at the last operation that a record needs, and ``output`` is ``None``.
            Buffers that later layers would have written are then not written.
        regions: A target (glob, class, ...): each matched block is compiled on its own,
            one compilation for all blocks of a kind, and the rest of the model runs
            eagerly.  ``fullgraph`` then holds for each block.
        on_eager: What to do where a value comes from outside every graph: ``"allow"``
            records it all the same, ``"error"`` raises.
        fullgraph: Raise where the model cannot be traced as one graph.
        dynamic: As in ``torch.compile``.
        backend: Name of a Dynamo backend, or a callable ``(graph_module, inputs)``.
            Records are copied out of graphs that write into the same outputs again
            (CUDA graphs); a callable of which that is true says so with an attribute
            ``reuses_outputs = True``.
        mode: As in ``torch.compile``.
        options: As in ``torch.compile``.
        max_variants: How many selections of one graph stay compiled; the least recently
            used one is dropped, and compiled again when it is asked for.
        **torch_compile_kwargs: Further keywords of ``torch.compile``.

    Returns:
        A wrapper whose call returns :class:`Captured`.

    Raises:
        SpecTypeError: ``model`` or ``spec`` is of the wrong type.
        TargetNotFoundError: a target matches no module of the model.
        AmbiguousTargetError: a class name names several classes.
    """
    model = as_module(model)
    if not isinstance(model, nn.Module):
        raise SpecTypeError(
            f"model is of type {type(model).__name__}",
            why="sites are calls of submodules, so it has to be a torch.nn.Module",
            remedy="pass the module; for a function that calls one, pass the module "
            "and call the captured module inside the function",
        )
    if on_eager not in ("allow", "error"):
        raise SpecTypeError(
            f"on_eager={on_eager!r} is not known", remedy='pass "allow" or "error"'
        )
    declared: dict[str, str] = {}
    if spec is None:
        spec, declared = declared_records(_torch.unwrap_optimized(model))
    elif not isinstance(spec, CaptureSpec):
        spec = CaptureSpec(spec)
    settings = {
        "declared": declared,
        "keep_output": keep_output,
        "regions": None if regions is None else Selector.of(regions),
        "on_eager": on_eager,
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "backend": backend,
        "mode": mode,
        "options": options,
        "max_variants": max_variants,
        **torch_compile_kwargs,
    }
    return CapturedModule(model, spec, settings)


@final
class CapturedModule(nn.Module):
    """A compiled model whose call returns its output and the records.

    Made by :func:`compile`.  Attributes, ``state_dict``, ``train`` and everything else
    of a module reach the model; names have no prefix.
    """

    _fxc_model: nn.Module
    _fxc_spec: CaptureSpec
    _fxc_settings: dict[str, Any]
    _fxc_selection: tuple[tuple[str, Any], ...]
    _fxc_written: tuple[tuple[str, Any], ...]  # the same, for printing
    _fxc_program: DynamoProgram
    _fxc_collect: Callable[..., tuple[Any, Records]]
    _fxc_told: set[str]
    _fxc_inputs: Callable[..., dict[str, Any]]

    def __init__(
        self,
        model: nn.Module,
        spec: CaptureSpec,
        settings: Mapping[str, Any],
        *,
        program: DynamoProgram | None = None,
        selection: tuple[tuple[str, Any], ...] = (),
        written: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        super().__init__()
        model = _torch.unwrap_optimized(model)
        own = self.__dict__
        _torch.share_tables(self, model)
        del own["training"]  # found on the model, through __getattr__
        if program is None:
            kwargs = dict(settings)
            kwargs.pop("on_eager")
            kwargs.pop("declared")
            program = DynamoProgram(
                model,
                spec,
                keep_output=kwargs.pop("keep_output"),
                backend=kwargs.pop("backend"),
                mode=kwargs.pop("mode"),
                options=kwargs.pop("options"),
                dynamic=kwargs.pop("dynamic"),
                fullgraph=kwargs.pop("fullgraph"),
                regions=kwargs.pop("regions"),
                max_variants=kwargs.pop("max_variants"),
                compile_kwargs=kwargs,
            )
        own["_fxc_model"] = model
        own["_fxc_spec"] = spec
        own["_fxc_settings"] = dict(settings)
        own["_fxc_selection"] = selection
        own["_fxc_written"] = written or selection
        own["_fxc_program"] = program
        own["_fxc_collect"] = collector(model, spec)
        own["_fxc_told"] = set()
        own["_fxc_inputs"] = input_finder(spec, model)

    def forward(
        self,
        /,
        *args: Any,
        select: Mapping[str, Any] | None = None,
        capture_inputs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Captured:
        """Run the model.

        Args:
            *args: The model's arguments.
            select: Record name to positions, for this call alone; no second trace.
            capture_inputs: Name to tensor: inputs of the spec's reductions that are no
                arguments of the model.
            **kwargs: The model's keyword arguments.

        Returns:
            The output and the records.

        Raises:
            TargetError: the spec does not fit what the run called.
            CaptureError: a value cannot be captured.
        """
        selection = self._fxc_selection
        if select is not None and not isinstance(select, Mapping):
            raise SpecTypeError(
                f"select={select!r} is of type {type(select).__name__}",
                why="a spec may have several records, each with positions of its own",
                remedy=f"name the record: select={{'"
                f"{next(iter(self._fxc_spec), 'name')}': {select!r}}}",
            )
        declared = self._fxc_settings["declared"]
        taken = None if _torch.is_traced() else taken_by(self, args, kwargs)
        flags = selections(declared, kwargs)
        if select is not None or flags:
            merged = dict(selection) | flags | dict(select or {})
            selection = canonical_selection(self._fxc_spec, merged)
        if _torch.is_traced():
            # Part of a larger trace: the records are outputs of that.
            model = self._fxc_model
            inputs = self._fxc_inputs(args, kwargs, capture_inputs)
            output, records = self._fxc_collect(
                lambda: model(*args, **kwargs), selection, inputs
            )
            output = output if self._fxc_settings["keep_output"] else None
        else:
            try:
                output, records, call = self._fxc_program.run(
                    args, kwargs, selection, capture_inputs
                )
            except TraceError as error:
                refuse_arguments(self._fxc_model, args, kwargs, error)
                raise
            if self._fxc_settings["on_eager"] == "error":
                refuse_eager(call)
        if taken is not None:
            taken(output, records)
        return Captured(inject_declared(output, records, declared, flags), records)

    def select(self, **select: Any) -> CapturedModule:
        """A sibling with other positions, on the same trace.

        Args:
            **select: Record name to positions: int, ints, slice, or ``None`` for all.

        Raises:
            TargetNotFoundError: a name is no record of the spec.
        """
        chosen = {n: as_chosen(s, f"select[{n!r}]") for n, s in select.items()}
        merged = dict(self._fxc_written) | chosen
        return CapturedModule(
            self._fxc_model,
            self._fxc_spec,
            self._fxc_settings,
            program=self._fxc_program,
            selection=canonical_selection(self._fxc_spec, merged),
            written=tuple(merged.items()),
        )

    def recording(self, *, keep: Keep = None) -> CallRecording:
        """A time in which every call of the model runs the captured program.

        Example::

            with captured.recording() as run:
                tokens = captured.generate(ids, max_new_tokens=20)
            run.calls[-1].records["hidden_states"]

        Whoever calls the model, a method of its own, a pipeline or a trainer, gets what
        the model returns, and ``run.calls`` an entry.  Recordings nest, and each thread
        has its own.  Afterwards the model is as before.  Code that was compiled around
        the model by somebody else runs as it was compiled, and is not recorded.

        Args:
            keep: Which calls stay: ``None`` for all, ``"last"``, the last so many, or a
                function that takes each :class:`RecordedCall` as it comes, none of
                which then stays.

        Raises:
            SpecTypeError: ``keep`` is none of these, or the model was compiled without
                its output.
        """
        return CallRecording(self, keep)

    @property
    def spec(self) -> CaptureSpec:
        """The spec, with this sibling's selection."""
        return self._fxc_parts()[1]

    @property
    def sites(self) -> SiteTable:
        """What the latest call found, in call order; empty before the first call."""
        return self._fxc_program.last_sites

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The instrumented graphs compiled so far, in order; do not edit them."""
        return tuple(self._fxc_program.graphs())

    def explain(
        self,
        format: Literal["table", "text", "svg", "dot"] = "table",
        *,
        full: bool = False,
    ) -> Printed:
        """Per record, which site fed which position in the latest call, and where.

        Args:
            format: ``"table"`` lists positions, with the reason for each copy and for
                what ran eagerly; ``"text"``, ``"svg"`` and ``"dot"`` draw the model's
                modules with their taps.
            full: Say in full why the model is not one graph, as Dynamo puts it; else
                in one line.

        Raises:
            SpecError: the format is none of these.
        """
        if format != "table":
            return draw(self, format)
        return explain(self._fxc_program, self._fxc_selection, full=full)

    def _fxc_parts(self) -> tuple[nn.Module, CaptureSpec, DynamoProgram]:
        """The model, the spec (with this sibling's selection) and the program."""
        spec = _selected(self._fxc_spec, self._fxc_written)
        return self._fxc_model, spec, self._fxc_program

    def __getattr__(self, name: str) -> Any:
        # Reached for what is neither here nor a parameter or submodule of the model.
        model = self.__dict__.get("_fxc_model")
        if model is None:
            raise AttributeError(name)
        found = getattr(model, name)
        return found if _torch.is_traced() else watched(self, name, found)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fxc_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fxc_model, name)

    def __dir__(self) -> list[str]:
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *dir(self._fxc_model)})

    def __repr__(self) -> str:
        return f"CapturedModule({self.spec!r})\n{self._fxc_model!r}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Compiled code cannot be copied or stored: a copy compiles again when called.
        return _rebuild, (
            self._fxc_model,
            self._fxc_spec,
            self._fxc_settings,
            self._fxc_selection,
        )


def _selected(spec: CaptureSpec, selection: tuple[tuple[str, Any], ...]) -> CaptureSpec:
    """The spec with other positions."""
    if not selection:
        return spec
    chosen = dict(selection)
    return CaptureSpec(
        {n: t.with_select(chosen.get(n, t.select)) for n, t in spec.items()}
    )


def _rebuild(
    model: nn.Module,
    spec: CaptureSpec,
    settings: Mapping[str, Any],
    selection: tuple[tuple[str, Any], ...],
) -> CapturedModule:
    return CapturedModule(model, spec, settings, selection=selection)


for _name in dir(nn.Module):
    # The rest of the module interface.  What the call itself goes through stays: hooks
    # of the model run when the model is called, not a second time around it.
    _own = _name.startswith("_") or _name in CapturedModule.__dict__
    if not _own and callable(getattr(nn.Module, _name)):
        setattr(CapturedModule, _name, delegate(_name))
CapturedModule._apply = delegate("_apply")  # type: ignore[method-assign]
