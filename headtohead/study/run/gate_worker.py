"""Process that runs the causality gate on user code: it reads runs from standard input and prints one line for each."""

from __future__ import annotations

import json
import sys

from headtohead.study.plan.execution import execution_settings_from, layers_of
from headtohead.study.run.admission import ANSWER, check_record


def main() -> None:
    """Check the runs given on the first line of standard input."""
    order = json.loads(sys.stdin.readline())
    execution = execution_settings_from(json.dumps(order["conditions"]))
    for record in order["records"]:
        found = check_record(record, execution, layers_of(record))
        print(f"\n{ANSWER}{json.dumps(found.as_dict())}", flush=True)


if __name__ == "__main__":
    main()
