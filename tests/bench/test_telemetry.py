import itertools
import threading

from dflash_deploy.bench.telemetry import GpuWatch
from dflash_deploy.machine.gpu import GpuSample


def watched(samples):
    """What comes of these looks at the card, and of no others."""
    rest, all_seen = iter(samples), threading.Event()

    def look():
        sample = next(rest, "none left")
        if sample == "none left":
            all_seen.set()
            return None
        return sample

    with GpuWatch(look, every_s=0.001) as watch:
        assert all_seen.wait(30)
    return watch.telemetry()


def test_figures_of_all_looks():
    hot = ("software thermal slowdown",)
    samples = [
        GpuSample(2000, 9000, 300.0, 60, (), 1000),
        None,
        GpuSample(2500, 9000, 400.0, 70, ("software power cap",), 3000),
        GpuSample(1500, 9000, 200.0, 90, hot, 2000),
        GpuSample(1500, 9000, 200.0, 90, hot, None),
    ]
    telemetry = watched(samples)
    assert telemetry.samples == 4
    assert (telemetry.clock_sm_mhz.low, telemetry.clock_sm_mhz.high) == (1500, 2500)
    assert telemetry.power_w.median == 250
    assert telemetry.temperature_c.high == 90
    assert telemetry.vram_peak_mib == 3000
    assert telemetry.throttled == 0.5
    assert telemetry.clock_reasons == {"software thermal slowdown": 0.5, "software power cap": 0.25}


def test_a_driver_that_tells_little():
    telemetry = watched([GpuSample(None, None, None, None, None, None)])
    assert (telemetry.clock_sm_mhz, telemetry.vram_peak_mib, telemetry.throttled) == (None, None, 0)


def test_no_card():
    assert watched([None, None]) is None


def test_a_driver_that_hangs_is_left_behind():
    never, looks = threading.Event(), itertools.count()

    def look():
        if next(looks):
            never.wait(60)
        return GpuSample(1, 1, 1, 1, (), 1)

    with GpuWatch(look, every_s=0.001) as watch:
        pass
    never.set()
    assert watch.telemetry().samples >= 1
