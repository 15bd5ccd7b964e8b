"""The hold model in SimPy: processes that wait a random time, again and again.

usage: hold.py PENDING SECONDS
Prints events per second.
"""

import itertools
import random
import sys
import time

import simpy

BATCH = 1000


def holder(environment, delays):
    while True:
        yield environment.timeout(next(delays))


def rate(environment, seconds):
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(BATCH):
            environment.step()
        done += BATCH
    return done / (time.perf_counter() - start)


pending, seconds = int(sys.argv[1]), float(sys.argv[2])
numbers = random.Random(1)
# Drawn before the measurement: Python's random numbers would take as long as the events.
delays = itertools.cycle([1000 + numbers.getrandbits(20) for _ in range(1 << 17)])
environment = simpy.Environment()
for _ in range(pending):
    environment.process(holder(environment, delays))
for _ in range(pending):  # Each one's start is an event too.
    environment.step()
rate(environment, seconds / 10)
print(rate(environment, seconds))
