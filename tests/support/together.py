"""Several threads of this process at once, for what otherwise happens in several processes."""

import threading


def together(*bodies, seconds=20):
    """Run all *bodies*, each in a thread: what they returned or raised, in their order.

    Fails where one takes longer than so many *seconds*.
    """
    outcomes = [None] * len(bodies)

    def run(place, body):
        try:
            outcomes[place] = body()
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for place, thread in enumerate(threads):
        thread.join(seconds)
        assert not thread.is_alive(), f"number {place} hangs"
    return outcomes


def good(outcomes):
    """The *outcomes*, where none of them is an exception; else the first of these is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
