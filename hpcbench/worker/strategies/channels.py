"""Filter and channel parallelism (Dryden et al. 2019; ParaDL, Nguyen et al. 2021) and their hybrids with replicas."""

from __future__ import annotations

from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.channels import Scheme
from hpcbench.parallel.datasets import input_shape
from hpcbench.worker.channels.divide import divide
from hpcbench.worker.strategies.model_parallel import ModelParallel


class Filter(ModelParallel):
    """The ranks along ``tp`` each compute some of every layer's output channels."""

    axis = "tp"
    key = "filter"

    def divide(self, model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
        """See ``channels.divide``."""
        scheme = Scheme(self.key, self.options["form"], self.options["split_last"])
        if self.own.size > 1:
            divide(model, input_shape(spec.dataset, spec.input_size), scheme, self.own)
        return model


class Channel(Filter):
    """The ranks along ``tp`` each take some of every layer's input channels and add up what they make of them."""

    key = "channel"
