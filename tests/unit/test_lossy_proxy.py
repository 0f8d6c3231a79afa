"""The proxy that loses and repeats: a consumer behind it ends right, over the real sockets of a publisher."""

from kvtierd.testing.clock import wait_for
from kvtierd.testing.consumer import ReferenceConsumer
from kvtierd.testing.fake_publisher import FakePublisher
from kvtierd.testing.local_daemon import free_port
from kvtierd.testing.lossy_proxy import LossyProxy
from kvtierd.wire.kvevents import BlockStored

H = 0xF100000000000000


def event(number):
    return BlockStored((H + number,), None, (1, 2, 3, 4), 4, None, "CPU", None)


def test_what_it_loses_is_a_gap_and_what_it_repeats_a_repeat():
    """L18."""
    ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with (
        FakePublisher(*ends) as publisher,
        LossyProxy(ends[0]) as proxy,
        ReferenceConsumer() as consumer,
    ):
        consumer.connect(proxy.endpoint, ends[1])

        def heard():
            publisher.publish()  # empty: whoever joins hears it, nobody loses it
            consumer.poll(0.01)
            return consumer.counts["batches"]

        wait_for(heard, "the consumer to join")
        for number in range(40):
            if number % 10 == 3:
                proxy.lose(2)
            if number % 10 == 7:
                proxy.repeat(1)
            publisher.publish(event(number))
            wait_for(lambda: proxy.passed + proxy.lost > number, "it to pass", poll=0.001)  # noqa: B023
        publisher.publish()
        consumer.wait_for(lambda c: len(c.resident) == 40)
        assert (proxy.lost, proxy.repeated) == (8, 4)
        assert consumer.counts["gaps"] >= 1
        assert consumer.counts["repeats"] >= 1


def test_its_source_may_go_and_come_back():
    where = f"tcp://127.0.0.1:{free_port()}"
    with LossyProxy(where) as proxy:
        for _ in range(2):
            before = proxy.passed

            def passed(before=before):
                publisher.publish(event(1))
                return proxy.passed > before

            with FakePublisher(where) as publisher:
                wait_for(passed, "the proxy to hear its source")
