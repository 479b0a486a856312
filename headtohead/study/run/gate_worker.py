"""The process in which the causality gate runs user code: it reads runs from standard input and prints a line for each."""

from __future__ import annotations

import json
import sys

from headtohead.study.plan.execution import conditions_from, layers_of
from headtohead.study.run.admission import ANSWER, inspect_record


def main() -> None:
    """Check the runs that the first line of standard input names."""
    order = json.loads(sys.stdin.readline())
    conditions = conditions_from(json.dumps(order["conditions"]))
    for record in order["records"]:
        found = inspect_record(record, conditions, layers_of(record))
        print(f"\n{ANSWER}{json.dumps(found.as_dict())}", flush=True)


if __name__ == "__main__":
    main()
