"""The samples of a job: their order, the position in them, their files. Importing it loads no torch."""

from elastipod.data.batch_split import BatchSplit as BatchSplit
from elastipod.data.batch_split import even_part as even_part
from elastipod.data.elastic_batches import Batch as Batch
from elastipod.data.elastic_batches import ElasticBatches as ElasticBatches
from elastipod.data.elastic_batches import MicroBatch as MicroBatch
