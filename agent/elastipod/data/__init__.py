"""The samples of a job: their order, their place, their files. Importing it loads no torch."""

from elastipod.data.plan import Batch as Batch
from elastipod.data.plan import ElasticBatches as ElasticBatches
from elastipod.data.plan import MicroBatch as MicroBatch
from elastipod.data.split import Split as Split
from elastipod.data.split import share as share
