import threading

from treadle.trainer.weight_sync.transports.chunk_queue import ChunkQueue


def test_messages_come_out_in_order_until_finished() -> None:
    feed: ChunkQueue[int] = ChunkQueue(2)

    def fill() -> None:
        for number in range(100):
            assert feed.put(number)
        feed.finish()

    thread = threading.Thread(target=fill)
    thread.start()
    assert list(feed) == list(range(100))
    thread.join()


def test_a_reader_that_leaves_frees_the_writer() -> None:
    feed: ChunkQueue[int] = ChunkQueue(1)
    full = threading.Event()
    results: list[bool] = []

    def fill() -> None:
        results.append(feed.put(1))
        full.set()
        results.append(feed.put(2))  # waits for room that never comes

    thread = threading.Thread(target=fill)
    thread.start()
    full.wait()
    feed.close()
    thread.join()
    assert results == [True, False]
    assert list(feed) == []
