"""The starter world: its grammar, its pictures, its split."""

import numpy as np
import pytest

from mixgrpo.backend.starter import text, world


def test_every_caption_parses_to_the_layout_it_states():
    for caption in world.single_captions() + world.pair_captions():
        layout = world.parse_caption(caption)
        assert (layout.second is None) == (layout.axis == "single")
        assert all(f"{thing.colour} {thing.shape}" in caption for thing in layout.things)
        assert caption.endswith(f"on a {layout.background} background")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a red circle left of a blue square on a white background", "a blue square right of a red circle on a white background"),
        ("a red circle above a blue square on a black background", "a blue square below a red circle on a black background"),
    ],
)
def test_opposite_relations_state_the_same_layout(one, other):
    assert world.parse_caption(one) == world.parse_caption(other)


@pytest.mark.parametrize(
    "caption", ["", "a red circle", "a purple circle on a white background", "two red circles on a white background"]
)
def test_other_sentences_are_refused_with_an_example(caption):
    with pytest.raises(world.CaptionError, match="write for example"):
        world.parse_caption(caption)


def test_pictures_are_a_function_of_the_generator_and_stay_inside_the_frame():
    for caption in world.pair_captions()[::97] + world.single_captions():
        first, second = (np.asarray(world.draw_caption(caption, np.random.default_rng(7))) for _ in range(2))
        assert first.shape == (64, 64, 3) and np.array_equal(first, second)
        edge = np.concatenate([first[0], first[-1], first[:, 0], first[:, -1]])
        assert (edge == world.BACKGROUNDS[world.parse_caption(caption).background]).all()


def test_about_a_fifth_of_the_captions_is_held_out():
    captions = world.pair_captions()
    assert len(set(captions)) == 1056
    assert 0.17 < sum(map(world.is_held_out, captions)) / len(captions) < 0.23


def test_every_caption_fits_the_tokens_and_has_no_unknown_word():
    ids = text.token_ids(text.build_tokenizer(), world.single_captions() + world.pair_captions())
    assert ids.shape == (1080, text.MAX_TOKENS)
    assert (ids != text.VOCABULARY["<unk>"]).all()
    assert (ids[:, 0] == text.START_TOKEN).all() and (ids[:, -2:] == text.END_TOKEN).all()


def test_unknown_words_case_and_punctuation():
    ids = text.token_ids(text.build_tokenizer(), ["A Red, circle.", "a purple circle", ""])
    assert ids[0, 1:4].tolist() == [text.VOCABULARY[word] for word in ("a", "red", "circle")]
    assert ids[1, 2] == text.VOCABULARY["<unk>"]
    assert ids[2, 1] == text.END_TOKEN
