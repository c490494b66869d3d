"""The tokens by which a speech model's folder says which language it hears, and what it is to do.

Radford et al. 2022 (Whisper, arXiv 2212.04356), section 2.3: a text begins with a start token, the language, the task,
and a token where no times are wanted. Keys of generation_config.json as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asbuilt.errors import InputError, one_of

NO_TIMES = "no_timestamps_token_id"
# Names of languages in English, by the codes that tokens have; several names may mean one.
LANGUAGES = {
    code: names.split("|")
    for code, names in (
        line.split(" ", 1)
        for line in """
en english
zh chinese|mandarin
de german
es spanish|castilian
ru russian
ko korean
fr french
ja japanese
pt portuguese
tr turkish
pl polish
ca catalan|valencian
nl dutch|flemish
ar arabic
sv swedish
it italian
id indonesian
hi hindi
fi finnish
vi vietnamese
he hebrew
uk ukrainian
el greek
ms malay
cs czech
ro romanian|moldavian|moldovan
da danish
hu hungarian
ta tamil
no norwegian
th thai
ur urdu
hr croatian
bg bulgarian
lt lithuanian
la latin
mi maori
ml malayalam
cy welsh
sk slovak
te telugu
fa persian
lv latvian
bn bengali
sr serbian
az azerbaijani
sl slovenian
kn kannada
et estonian
mk macedonian
br breton
eu basque
is icelandic
hy armenian
ne nepali
mn mongolian
bs bosnian
kk kazakh
sq albanian
sw swahili
gl galician
mr marathi
pa punjabi|panjabi
si sinhala|sinhalese
km khmer
sn shona
yo yoruba
so somali
af afrikaans
oc occitan
ka georgian
be belarusian
tg tajik
sd sindhi
gu gujarati
am amharic
yi yiddish
lo lao
uz uzbek
fo faroese
ht haitian creole|haitian
ps pashto|pushto
tk turkmen
nn nynorsk
mt maltese
sa sanskrit
lb luxembourgish|letzeburgesch
my myanmar|burmese
bo tibetan
tl tagalog
mg malagasy
as assamese
tt tatar
haw hawaiian
ln lingala
ha hausa
ba bashkir
jw javanese
su sundanese
yue cantonese
""".strip().splitlines()
    )
}
CODES = {name: code for code, names in LANGUAGES.items() for name in names}


def task_tokens(said: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Returns the tokens of the settings' `language` and `task`, and that for no times; none where both are missing.

    Without a task it is to transcribe. Raises InputError for a language or a task that the settings have no token of,
    and for a task without a language.
    """
    language, task = said.get("language"), said.get("task")
    languages, tasks = said.get("lang_to_id"), said.get("task_to_id")
    if (language is None and task is None) or not isinstance(languages, dict) or not isinstance(tasks, dict):
        return ()
    told = str(language).lower()
    named = next((name for name in (told, f"<|{CODES.get(told, told)}|>") if name in languages), None)
    if language is None or named is None:
        allowed = "a language of lang_to_id, as its code or its English name"
        raise InputError(field=f"{where}: language", value="none" if language is None else language, allowed=allowed)
    wanted = "transcribe" if task is None else task
    if wanted not in tasks:
        raise InputError(field=f"{where}: task", value=wanted, allowed=one_of(sorted(map(str, tasks))))
    return without_times(
        said, (_token(languages[named], where, "lang_to_id"), _token(tasks[wanted], where, "task_to_id"))
    )


def languages(said: Mapping[str, Any], where: str) -> dict[str, int]:
    """Returns the tokens of languages by name, of which the model is to hear one; none where the settings say it."""
    found, forced = said.get("lang_to_id"), said.get("forced_decoder_ids")
    if not isinstance(found, dict) or said.get("language") is not None:
        return {}
    if said.get("task") is None and forced and not (isinstance(forced[0], list) and forced[0][-1] is None):
        return {}
    return {str(name): _token(token, where, "lang_to_id") for name, token in found.items()}


def heard_tokens(said: Mapping[str, Any], where: str, language: int) -> tuple[int, ...]:
    """Returns the tokens after the start token, in a language that was heard: with the task that is set or forced."""
    task, tasks = said.get("task"), said.get("task_to_id")
    if task is not None:
        known = tasks if isinstance(tasks, dict) else {}
        if task not in known:
            raise InputError(field=f"{where}: task", value=task, allowed=one_of(sorted(map(str, known))))
        return without_times(said, (language, _token(known[task], where, "task_to_id")))
    forced = said.get("forced_decoder_ids") or []
    later = (pair for pair in forced if isinstance(pair, list) and len(pair) == 2 and pair[0] > 1)
    return without_times(said, (language, *(_token(token, where, "forced_decoder_ids") for _, token in later)), 1)


def without_times(said: Mapping[str, Any], tokens: tuple[int, ...], least: int = 2) -> tuple[int, ...]:
    """Returns the first tokens of a text with the one for no times, where the settings have one and want none.

    Before a language is known, of fewer tokens than `least`, there is none: the model says it first.
    """
    token, times = said.get(NO_TIMES), said.get("return_timestamps")
    unknown = isinstance(said.get("lang_to_id"), dict) and len(tokens) < least
    if times is True and tokens and tokens[-1] == token:
        return tokens[:-1]
    if type(token) is not int or times is True or unknown or token in tokens:
        return tokens
    return (*tokens, token)


class Segments:
    """The segments of a text with times, one after the other: from which second to which, None for open, and the text.

    `seconds` gives the time that a token says, None for none; `decode` the text of the others.
    """

    def __init__(self, seconds: Callable[[int], float | None], decode: Callable[[list[int]], str]) -> None:
        self.found: list[tuple[float, float | None, str]] = []
        self._seconds, self._decode = seconds, decode
        self._start = 0.0
        self._tokens: list[int] = []

    def push(self, token: int) -> str:
        """Returns the line of the segment that ends with this token; empty if none does."""
        time = self._seconds(token)
        if time is None:
            self._tokens.append(token)
            return ""
        if not self._tokens:
            self._start = time
            return ""
        return self._ended(time)

    def finish(self) -> str:
        """Returns the line of a segment whose end is not said; empty without one."""
        return self._ended(None) if self._tokens else ""

    def _ended(self, time: float | None) -> str:
        text = self._decode(self._tokens).strip()
        self.found.append((self._start, time, text))
        start, self._tokens = self._start, []
        self._start = start if time is None else time
        return f"[{start:.2f} - {'' if time is None else f'{time:.2f}'}] {text}\n"


def _token(value: object, where: str, key: str) -> int:
    if type(value) is not int or value < 0:
        raise InputError(field=f"{where}: {key}", value=value, allowed="token ids by name")
    return value
