"""A single-device model becomes one whose layers are shared by a group: modules are replaced, names stay."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hpcbench.errors import WorkerError
from hpcbench.parallel.channels import Layer, Scheme, extents, fits, largest_degree, split_of
from hpcbench.worker.channels.collectives import Shares
from hpcbench.worker.channels.layers import DROPOUTS, NORMS, SplitDropout, SplitLayer, split_norm
from hpcbench.worker.channels.probe import LAYERS, Call, Probed, probe
from hpcbench.worker.groups import Group


def divide(model: nn.Module, shape: tuple[int, ...], scheme: Scheme, group: Group) -> None:
    """Leave in ``model``, which takes samples of ``shape``, this rank's parts of its layers. In place.

    Raises ``WorkerError`` (``unsupported``) where the model does what cannot be split, or has too few channels.
    """
    found = probe(model, shape)
    layers = found.layers()
    _refuse(model, found, layers, scheme, group.size)
    done: set[str] = set()
    for call in found.calls:
        if call.name in done:
            continue
        done.add(call.name)
        if isinstance(call.module, LAYERS):
            split = split_of(layers[call.name], scheme, group.size)
            if split.by or split.enter.forward:
                part = SplitLayer(call.module, layers[call.name], split, group)
                _replace(model, call.module, part)
        elif scheme.form == "sharded" and not _is_whole(call, found):
            _divide_between(model, call, group)


def _divide_between(model: nn.Module, call: Call, group: Group) -> None:
    shares = Shares(group, extents(call.channels, group.size, call.features))
    if isinstance(call.module, NORMS):
        split_norm(call.module, shares)
    elif isinstance(call.module, DROPOUTS):
        _replace(model, call.module, SplitDropout(call.module, shares))


def _is_whole(call: Call, found: Probed) -> bool:
    """Before the first layer, and behind the last."""
    places = [place for place, one in enumerate(found.calls) if isinstance(one.module, LAYERS)]
    return call.channels == 0 or found.calls.index(call) > places[-1]


def _replace(model: nn.Module, old: nn.Module, part: nn.Module) -> None:
    """Everywhere: a layer may be called under several names."""
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is old:
                owner._modules[name] = part


def _refuse(model: nn.Module, found: Probed, layers: dict[str, Layer], scheme: Scheme, degree: int) -> None:
    problems = [*found.refused, *(found.problems if scheme.form == "sharded" else ())]
    users = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    if any(count > 1 for count in users.values()):
        problems.append("layers share a weight")
    if not layers:
        problems.append("there is no convolution and no linear layer")
    seen: dict[str, Call] = {}
    for call in found.calls:
        other = seen.setdefault(call.name, call)
        if (other.channels, other.features) != (call.channels, call.features):
            problems.append(f"{call.name} is called with different channels")
    if problems:
        raise WorkerError(
            f"{scheme.strategy} in its {scheme.form} form cannot split this model: {'; '.join(problems[:3])}",
            status="unsupported",
            hint="use ddp or fsdp"
            if scheme.form == "gathered" or found.refused
            else 'try options.form = "gathered", or use ddp or fsdp',
        )
    if not fits(list(layers.values()), scheme, degree):
        most = largest_degree(list(layers.values()), scheme, degree)
        raise WorkerError(
            f"{scheme.strategy} over {degree} ranks: a layer has fewer channels than that",
            status="unsupported",
            hint=f"the largest tp_degree that works is {most}",
        )
