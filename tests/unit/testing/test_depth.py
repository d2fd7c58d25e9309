"""Pictures of depth over time show the recorded samples. Equal samples give equal pictures."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from qflow_client.testing.depth import DepthPanel, DepthSample, draw_depth

SVG = "{http://www.w3.org/2000/svg}"
MARKS = {"highest": 165, "stop": 100, "resume": 70}
RUN = (
    DepthSample(0.0, 0, 0, False),
    DepthSample(0.1, 165, 1_650_000, True),
    DepthSample(0.5, 69, 690_000, False),
    DepthSample(1.0, 101, 1_010_000, True),
)


def draw(*panels: DepthPanel) -> str:
    return draw_depth(panels, title="A queue", made_by="a test")


def elements(picture: str, tag: str, kind: str) -> list[ET.Element]:
    return [each for each in ET.fromstring(picture).iter(SVG + tag) if kind in each.get("class", "").split()]


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(picture).iter(SVG + "text")]


def steps(picture: str) -> list[list[float]]:
    """Return the coordinates of each line."""
    return [
        [float(each) for each in re.findall(r"[\d.]+", path.get("d", ""))]
        for path in elements(picture, "path", "depth")
    ]


def test_the_same_depth_samples_are_drawn_as_the_same_svg_bytes() -> None:
    assert draw(DepthPanel("run", RUN, None, MARKS)) == draw(DepthPanel("run", list(RUN), None, dict(MARKS)))


def test_each_depth_is_drawn_up_to_the_time_of_the_next_sample() -> None:
    (line,) = steps(draw(DepthPanel("run", RUN)))
    xs, ys = [line[0], *line[2::2]], [line[1], *line[3::2]]
    assert xs == sorted(xs)
    # 165 is the highest point on the page. The y coordinate grows downwards.
    assert ys[1] < ys[3] < ys[2] < ys[0]
    assert (xs[2] - xs[0]) / (xs[3] - xs[0]) == pytest.approx(0.5, abs=0.01)


def test_periods_in_which_the_queue_is_on_are_coloured_from_begin_to_end() -> None:
    picture = draw(DepthPanel("run", RUN, None, MARKS))
    on = elements(picture, "rect", "on")
    widths = [float(each.get("width", "")) for each in on]
    assert len(on) == 2
    assert widths[0] > 0
    # The queue was ON when the recording ended.
    assert widths[1] == 0
    assert "red background: the flow state is ON" in texts(picture)[-1]


def test_thresholds_and_peak_depth_are_labelled_at_their_height_in_the_picture() -> None:
    picture = draw(DepthPanel("run", RUN, 166, MARKS))
    assert {"165 highest", "100 stop", "70 resume", "peak 166"} <= set(texts(picture))
    heights = {each.get("class"): each.get("d", "").split()[1] for each in elements(picture, "path", "mark")}
    assert len(heights) == 3
    (line,) = steps(picture)
    assert f"{line[3]}H648" == heights["mark highest"]


def test_the_labels_of_thresholds_that_are_close_together_do_not_overlap_in_the_picture() -> None:
    picture = draw(DepthPanel("run", RUN, None, {"stop": 100, "resume": 99, "highest": 101}))
    at = [
        float(each.get("y", "")) for kind in ("highest", "stop", "resume") for each in elements(picture, "text", kind)
    ]
    assert at[1] - at[0] >= 14
    assert at[2] - at[1] >= 14


def test_a_picture_of_the_depth_in_bytes_is_labelled_in_bytes() -> None:
    picture = draw(DepthPanel("run", RUN, 1_650_000, {"stop": 1_000_000}, of_bytes=True))
    assert {"peak 1.65 MB", "1 MB stop", "blue: depth in body bytes; red background: the flow state is ON"} <= set(
        texts(picture)
    )


def test_several_depth_panels_of_a_picture_have_the_same_scales_and_do_not_overlap() -> None:
    low = tuple(replace(sample, depth=sample.depth // 5, on=False) for sample in RUN[:3])
    picture = draw(DepthPanel("high", RUN), DepthPanel("low & <lower>", low))
    high, flat = steps(picture)
    assert max(high[1::2]) < min(flat[1::2])
    # The line of the shorter run ends earlier.
    assert flat[-2] == high[-4]
    assert (flat[1] - flat[3]) * 5 == pytest.approx(high[1] - high[3], abs=1)
    assert "A queue. high: peak 165; low & <lower>: peak 33" in (ET.fromstring(picture).findtext(SVG + "title") or "")


def test_the_line_of_a_long_recording_has_only_as_many_points_as_are_visible_and_shows_every_peak() -> None:
    run = [DepthSample(at / 10_000, at % 7, 0, False) for at in range(20_000)]
    run[5555] = replace(run[5555], depth=99)
    (line,) = steps(draw(DepthPanel("run", run)))
    assert len(line) < 2 * 4 * 402
    assert "peak 99" in texts(draw(DepthPanel("run", run)))
    assert min(line[1::2]) < sorted(set(line[1::2]))[1]


def test_a_depth_recording_with_one_sample_can_be_drawn() -> None:
    assert "peak 0" in texts(draw(DepthPanel("run", RUN[:1])))


@pytest.mark.parametrize("panels", [(), (DepthPanel("run", ()),)])
def test_drawing_a_depth_recording_without_samples_raises_an_error(panels: tuple[DepthPanel, ...]) -> None:
    with pytest.raises(ValueError, match="there is nothing to draw"):
        draw(*panels)
