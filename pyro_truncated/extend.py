"""Tools for authors of models, likelihoods and searches.

A model of your own needs none of them. They are for models that others use.

- :class:`UniqueModule`: a module whose parameters have names of their own in Pyro's store.
- :func:`takes_arrays`: arrays of NumPy, pandas and xarray become tensors.
- :func:`names_arguments`: errors from the depths name the argument that caused them.
- :func:`check_counts`: numbers of things are positive integers.
- :func:`check_observable`: data are what a likelihood can observe.
- :func:`raise_if`, :func:`read_conditions`: checks of data on a device that do not wait for it.
- :func:`selected_rows`: the data points that a plate selects.
- :class:`Renamed`: the old name of a method or property, which warns.
- :func:`generator_device`: the device on which a generator draws.
- :func:`shard_sum`: sums over data points that several processes share.
- :func:`global_positions`: where the data points of a process lie among all.
- :func:`some_rows`: some data points of all processes.
"""

from pyro_truncated.distributed.shards import global_positions, shard_sum, some_rows
from pyro_truncated.ops.deferred_checks import raise_if, read_conditions
from pyro_truncated.program.observed import check_observable
from pyro_truncated.utils.arguments import Renamed, check_counts, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import selected_rows
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import UniqueModule

__all__ = [
    "Renamed",
    "UniqueModule",
    "check_counts",
    "check_observable",
    "generator_device",
    "global_positions",
    "names_arguments",
    "raise_if",
    "read_conditions",
    "selected_rows",
    "shard_sum",
    "some_rows",
    "takes_arrays",
]
