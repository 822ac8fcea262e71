"""How much memory is free, by what the system tells."""

import pytest

from infoflow_lens.foundation import memory
from infoflow_lens.foundation.memory import free_memory

GIB = 2**30


def system(root, files):
    """A file system with these files below `root`; the machine has 8 GiB available."""
    meminfo = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(folder, limit, used, cached=0):
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 7",
    }


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        # version 2: its own limit, less what is used without caches
        (
            {"proc/self/cgroup": "0::/a/b", **group(f"{V2}/a/b", 4 * GIB, 3 * GIB, GIB // 2)},
            1.5 * GIB,
        ),
        # that of the group around it is narrower
        (
            {
                "proc/self/cgroup": "0::/a/b",
                **group(f"{V2}/a/b", "max", GIB),
                **group(f"{V2}/a", 4 * GIB, 3 * GIB),
            },
            GIB,
        ),
        # the host's path, of which a container sees the root alone
        ({"proc/self/cgroup": "0::/docker/c0ffee", **group(V2, 2 * GIB, GIB)}, GIB),
        ({"proc/self/cgroup": "0::/", **group(V2, 2 * GIB, 3 * GIB)}, 0),
        ({"proc/self/cgroup": "0::/", **group(V2, "max", GIB)}, 8 * GIB),
        # version 1 beside an empty version 2
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n1:name=systemd:/x\n0::/",
                f"{V1}/x/memory.limit_in_bytes": 3 * GIB,
                f"{V1}/x/memory.usage_in_bytes": 2 * GIB,
                f"{V1}/x/memory.stat": f"cache 5\ntotal_inactive_file {GIB}",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/",
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 2 * GIB,
            },
            8 * GIB,
        ),
    ],
)
def test_the_narrowest_limit_counts(files, expected, tmp_path):
    assert free_memory(system(tmp_path, files)) == expected


def test_without_the_list_of_the_machine_all_of_it_counts(tmp_path, monkeypatch):
    assert free_memory(tmp_path) >= free_memory()

    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(memory.os, "sysconf", unknown)
    assert free_memory(tmp_path) is None
