"""What the kernel counts of rxe0."""

from pathlib import Path

FOLDER = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")


def counters() -> dict[str, int]:
    return {
        path.name: int(path.read_text()) for path in FOLDER.iterdir() if path.read_text().strip().isdigit()
    }
