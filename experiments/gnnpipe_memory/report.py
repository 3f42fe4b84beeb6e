"""Raw lines that do not name their job."""

from collections.abc import Mapping


def job(row: Mapping[str, str]) -> str:
    method = f"gnnpipe, remat={row['remat']}" if row.get("remat") else row.get("strategy")
    return row.get("job") or f"{row['model']}; {row['layers']}; {method}"
