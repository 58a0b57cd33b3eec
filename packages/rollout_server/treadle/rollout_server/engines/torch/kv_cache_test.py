import torch

from treadle.rollout_server.engines.torch.kv_cache import KvCache, KvCacheShape


def rows(max_rows: int = 20, max_length: int = 600) -> KvCache:
    return KvCache(
        KvCacheShape(
            num_layers=2,
            num_heads=3,
            head_dim=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_rows=max_rows,
            max_length=max_length,
        )
    )


def test_growing_keeps_what_is_there_and_stays_finite() -> None:
    kv = rows()
    kv.reserve(1, 10)
    keys, values = kv.layer(1)
    keys[0, :, :10], values[0, :, :10] = 1.0, 2.0
    kv.reserve(9, 300)
    assert kv.capacity == (16, 512)
    keys, values = kv.layer(1)
    assert (keys[0, :, :10] == 1.0).all() and (values[0, :, :10] == 2.0).all()
    assert not keys[0, :, 10:].any() and not keys[1:].any()


def test_growth_stops_at_the_bounds() -> None:
    kv = rows(max_rows=5, max_length=37)
    kv.reserve(5, 37)
    assert kv.capacity == (5, 48)  # Whole vectors.


def test_rows_are_copied_snapshotted_and_restored() -> None:
    kv = rows()
    kv.reserve(3, 8)
    keys, values = kv.layer(0)
    keys[2] = torch.randn_like(keys[2])
    values[2] = torch.randn_like(values[2])
    kv.copy_row(2, 0, 5)
    assert torch.equal(keys[0, :, :5], keys[2, :, :5]) and not keys[0, :, 5:].any()
    snapshot = kv.snapshot(2, 6)
    assert snapshot.nbytes == 6 * kv.shape.bytes_per_token
    keys[2] = 0.0
    kv.restore(1, snapshot, 4)
    assert torch.equal(values[1, :, :4], snapshot[0, 1, :, :4]) and not values[1, :, 4:].any()


def test_released_memory_can_be_reserved_again() -> None:
    kv = rows()
    kv.reserve(2, 2)
    kv.release()
    assert kv.capacity == (0, 0)
    kv.reserve(1, 1)
    assert kv.capacity == (8, 256)
