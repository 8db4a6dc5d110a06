import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from cache_store import metrics

README = (Path(__file__).parents[2] / "cache_store" / "README.md").read_text()


def test_every_series_is_documented_and_no_other():
    found = {
        name + ("_total" if isinstance(series, Counter) else "")
        for series in vars(metrics).values()
        if isinstance(series, Counter | Gauge | Histogram)
        for name in [series.describe()[0].name.removeprefix("longhaul_store")]
    }
    section = README.split("## Metrics", 1)[1]
    said = {
        name.removeprefix("longhaul_store")
        for name in re.findall(r"`((?:longhaul_store)?_[a-z_]+)[`{]", section)
    }
    assert found == said
