"""Say how many rows of a table hold what their call in releases-500.csv says."""

import csv
import re
import sys
from pathlib import Path


def read(name: str) -> list[dict[str, str]]:
    with Path(name).open(newline="") as lines:
        return list(csv.DictReader(lines))


calls = {row["id"]: row["call"] for row in read("releases-500.csv")}
table = read(sys.argv[1])
right = 0
for row in table:
    told = re.findall(r"[a-z]+|[\d.]+", calls[row["custom_id"]].lower())
    right += {row["name"], row["version"], row["year"]} <= set(told)
print(f"{right} of {len(table)} rows are right")
