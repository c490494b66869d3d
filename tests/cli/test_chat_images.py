"""A chat with images, small random models: each is read once, and answers are those of a fresh run of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_generate_images import CONFIGS, NEW, PLACE, Run, _folder, _pictures

import asbuilt
from asbuilt.api.chat import open_chat
from asbuilt.checkpoint.source import open_model
from asbuilt.generate.chat import Answer, Chat, Message
from asbuilt.generate.sampling import Sampling

# Token 5, the placeholder, is "&".
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '&' if p.type == 'image' else p.text }}{% endfor %}{% endif %}</s>{% endfor %}"
)


@pytest.fixture(params=CONFIGS)
def seer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int, list[Path]]:
    """A folder, its end token, and two images of different sizes."""
    folder = tmp_path / "tiny"
    *_, end = _folder(request.param, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder, end, _pictures(tmp_path)


def test_answers_with_images_are_those_of_a_fresh_run(seer: tuple[Path, int, list[Path]]) -> None:
    folder, end, files = seer
    source = open_model(folder, weights=True)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    chat, _ = open_chat(source, max_new_tokens=NEW)
    ids: list[int] = []
    seen: list[Path] = []
    for text, images in (("as", files[:1]), ("built", []), ("it", files[1:]), ("is", [])):
        ids += [*[PLACE] * len(images), *tokenizer.encode(text), end]
        seen += images
        before = chat.used
        answer = chat.send(text, images=images)
        "".join(answer)
        assert answer.kept == before
        want = asbuilt.generate(source, ids, images=seen, max_new_tokens=NEW, sampling=Sampling(suppress=(PLACE,)))
        assert answer.tokens == want
        ids += [token for token in want if token != end] + [end]


def talk(chat: Chat, text: str, *images: Path) -> Answer:
    answer = chat.send(text, images=images)
    "".join(answer)
    return answer


def test_another_image_in_the_same_place_is_read(seer: tuple[Path, int, list[Path]]) -> None:
    """After a question that was not answered, or a restored chat, nothing of an earlier image is kept."""
    folder, _, files = seer
    source = open_model(folder, weights=True)
    chat, _ = open_chat(source, max_new_tokens=NEW)
    first = talk(chat, "as", files[0]).tokens
    chat.reset()
    second = talk(chat, "as", files[1]).tokens
    chat.restore([Message(role="user", content="as", images=(files[0],)), Message(role="assistant", content="b")])
    third = talk(chat, "c")
    assert third.kept == 0
    chat.reset()
    assert talk(chat, "as", files[0]).tokens == first
    assert talk(open_chat(source, max_new_tokens=NEW)[0], "as", files[1]).tokens == second


def test_commands_take_files(run: Run, seer: tuple[Path, int, list[Path]], tmp_path: Path) -> None:
    folder, _, files = seer
    saved = tmp_path / "said.json"
    made = run("chat", folder, "-n", 4, "--image", files[0], input=f"as\n/image {files[1]}\nit\n/save {saved}\n")
    assert made.exit_code == 0, made.output
    images = [message.get("images") for message in json.loads(saved.read_text())["messages"]]
    assert images == [[str(files[0])], None, [str(files[1])], None]
    again = run("chat", folder, "-n", 4, input=f"/load {saved}\nc\n")
    assert again.exit_code == 0, again.output
    for line, said in (("/image nowhere.png", "nowhere.png"), ("/audio a.wav", "the model reads no sound")):
        refused = run("chat", folder, input=f"{line}\n")
        assert (refused.exit_code, said in refused.stderr) == (2, True)
