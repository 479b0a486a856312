"""A static site of several studies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headtohead.api.checked import checked
from headtohead.api.study import open_study
from headtohead.common.errors import UserError
from headtohead.common.progress import progress_bar
from headtohead.study.config.folder import check_no_study, given_folder
from headtohead.study.judge.analysis import Analysis


@checked
def write_site(
    folders: Sequence[str | Path], out: str | Path = "site", *, title: str = "Studies", quiet: bool = False
) -> Path:
    """Write a page with a card per study and a copy of each report into `out`; return the page's path.

    The reports are rebuilt first.
    """
    if not folders:
        raise UserError("a site needs a study: h2h site DIR ...")
    folder = given_folder(out)
    check_no_study(folder, "a site")
    results = [open_study(folder) for folder in folders]
    try:
        from headtohead.report import site
    except ImportError as error:
        raise UserError(f"a site needs {error.name}: pip install altair vl-convert-python jinja2") from None
    with progress_bar("writing reports", quiet) as progress:

        def studies() -> Iterator[tuple[Path, Analysis]]:
            for count, result in enumerate(results):
                progress(f"writing the report of {result.path}", count / len(results))
                result.write(quiet=True)
                yield result.path, result.analysis

        return site.write_site(folder, studies(), title)
