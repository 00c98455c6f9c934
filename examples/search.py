"""Find the rows of a Parquet of vectors that are nearest to a question.

Usage: search.py VECTORS.parquet MODEL QUESTION, where omlx-submit embed wrote the vectors.
Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says. It needs numpy and pyarrow.
"""

import sys

import numpy as np
from pyarrow import compute, parquet

from omlx_producer import Producer

path, model, question = sys.argv[1:4]
table = parquet.read_table(path, filters=compute.field("embedding").is_valid())
vectors = np.stack(table["embedding"].to_numpy())
with Producer() as producer:
    [asked] = producer.embed([question], model=model)
likeness = vectors @ np.array(asked)
for row in np.argsort(likeness)[::-1][:5].tolist():
    found = table.drop_columns("embedding").slice(row, 1).to_pylist()[0]
    print(f"{likeness[row]:.3f}", {name: value for name, value in found.items() if value})
