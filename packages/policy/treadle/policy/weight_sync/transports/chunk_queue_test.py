import threading

from treadle.policy.weight_sync.transports.chunk_queue import ChunkQueue


def test_messages_come_out_in_order_until_finished() -> None:
    queue: ChunkQueue[int] = ChunkQueue(2)

    def fill() -> None:
        for number in range(100):
            assert queue.put(number)
        queue.finish()

    thread = threading.Thread(target=fill)
    thread.start()
    assert list(queue) == list(range(100))
    thread.join()


def test_a_reader_that_leaves_frees_the_writer() -> None:
    queue: ChunkQueue[int] = ChunkQueue(1)
    full = threading.Event()
    results: list[bool] = []

    def fill() -> None:
        results.append(queue.put(1))
        full.set()
        results.append(queue.put(2))  # waits for room that never comes

    thread = threading.Thread(target=fill)
    thread.start()
    full.wait()
    queue.close()
    thread.join()
    assert results == [True, False]
    assert list(queue) == []
