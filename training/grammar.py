"""One clause, two languages: an abstract syntax with a German and an English linearisation.

Problem: a corpus for learning to translate needs pairs that are right by construction.
Idea: a `Clause` says who does what to whom, where and when, and nothing of either language's
word order; `german` and `english` each spell it out. Everything a learner of German stumbles on
is one visible rule here: the bracket of finite verb and closing, the finite verb in first,
second or last place, the order between them, the endings of articles and adjectives.

    opening   finite  middle                                 closing
    Gestern   hat     der Vater das Buch in der Schule       gefunden.
    Der Vater hat     das Buch gestern nicht in der Schule   gefunden.
    Der Vater macht   jetzt das Fenster                      auf.
    weil              der Vater gestern das Buch             gefunden hat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from training.lexicon import (
    ACCUSATIVE,
    DATIVE,
    ER,
    MASS,
    NOMINATIVE,
    NUMBERS,
    POSSESSIVES,
    PRONOUNS,
    WIR,
    Adjective,
    Modal,
    Noun,
    Verb,
)

Tense = Literal["present", "progressive", "future", "past"]  # German says the first three alike
Slot = Literal["subject", "direct", "dative", "time", "place", "reason"]

# Per case: masculine, feminine, neuter, plural.
_DER = (
    ("der", "die", "das", "die"),
    ("den", "die", "das", "die"),
    ("dem", "der", "dem", "den"),
)
_EIN = (("", "e", "", "e"), ("en", "e", "", "e"), ("em", "er", "em", "en"))
_WEAK = (("e", "e", "e", "en"), ("en", "e", "e", "en"), ("en", "en", "en", "en"))
_MIXED = (("er", "e", "es", "en"), ("en", "e", "es", "en"), ("en", "en", "en", "en"))
_STRONG = (("er", "e", "es", "e"), ("en", "e", "es", "e"), ("em", "er", "em", "en"))
_RELATIVE = (*_DER[:2], ("dem", "der", "dem", "denen"))
_CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur"}
_HUMAN = {"adult", "youth", "family", "elder"}


class Phrase(Protocol):
    """What fills the place of subject or object."""

    @property
    def form(self) -> int: ...

    @property
    def owner(self) -> str: ...  # the pronoun that takes this one up: a key of PRONOUNS

    def german(self, case: int) -> str: ...

    def english(self, subject: bool) -> str: ...


@dataclass(frozen=True)
class Pronoun:
    owner: str

    @property
    def form(self) -> int:
        return PRONOUNS[self.owner][5]

    def german(self, case: int) -> str:
        return PRONOUNS[self.owner][:3][case]

    def english(self, subject: bool) -> str:
        return PRONOUNS[self.owner][3] if subject else PRONOUNS[self.owner][4]


@dataclass(frozen=True)
class Name:
    """Anna, or Anna und Paul."""

    words: str
    owner: str

    @property
    def form(self) -> int:
        return PRONOUNS[self.owner][5]

    def german(self, case: int) -> str:  # noqa: ARG002
        return self.words

    def english(self, subject: bool) -> str:  # noqa: ARG002
        return self.words.replace(" und ", " and ")


@dataclass(frozen=True)
class NounPhrase:
    noun: Noun
    determiner: str = "der"  # der ein kein, a key of POSSESSIVES or NUMBERS, a name, "wie viele"
    plural: bool = False
    adjective: Adjective | None = None
    relative: Clause | None = None

    @property
    def form(self) -> int:
        return WIR if self.plural else ER

    @property
    def owner(self) -> str:
        if self.plural:
            return "sie+"
        return {"m": "er", "f": "sie", "n": "es"}[self.noun.gender]

    @property
    def given(self) -> bool:
        """Known to the listener, so that it stands early in a German clause."""
        new = ("", "ein", "kein", "wie viele", *NUMBERS)
        return self.determiner not in new

    def german(self, case: int) -> str:
        column = 3 if self.plural else "mfn".index(self.noun.gender)
        endings = _MIXED
        if self.determiner == "der":
            article, endings = _DER[case][column], _WEAK
        elif self.determiner in ("ein", "kein"):
            article = self.determiner + _EIN[case][column]
        elif self.determiner in POSSESSIVES:
            article = POSSESSIVES[self.determiner][0] + _EIN[case][column]
        else:
            name = self.determiner[:1].isupper()
            article, endings = self.determiner + ("s" if name else ""), _STRONG
        quality = self.adjective.stem + endings[case][column] if self.adjective else ""
        words = _join(article, quality, self.noun.decline(case, self.plural))
        return f"{words}, {german(self.relative, 'last')}," if self.relative else words

    def english(self, subject: bool) -> str:  # noqa: ARG002
        quality = self.adjective.english if self.adjective else ""
        words = _join(quality, self.noun.english_plural if self.plural else self.noun.english)
        words = _join(self._english_determiner(words), words)
        return _join(words, english(self.relative)) if self.relative else words

    def _english_determiner(self, following: str) -> str:
        indefinite = "an" if following[0] in "aeiou" else "a"
        if self.determiner == "kein" and (self.plural or self.noun.kind in MASS):
            return "any"
        if self.determiner[:1].isupper():
            return self.determiner + "'s"
        fixed = {"": "", "der": "the", "ein": indefinite, "kein": indefinite}
        fixed["wie viele"] = "how many"
        owners = {owner: word for owner, (_, word) in POSSESSIVES.items()}
        return (fixed | owners | NUMBERS)[self.determiner]


@dataclass(frozen=True)
class RelativePronoun:
    """der, den, dem ... as the noun before it has gender and number: who, that."""

    noun: Noun
    plural: bool

    @property
    def form(self) -> int:
        return WIR if self.plural else ER

    @property
    def owner(self) -> str:
        return NounPhrase(self.noun, plural=self.plural).owner

    def german(self, case: int) -> str:
        return _RELATIVE[case][3 if self.plural else "mfn".index(self.noun.gender)]

    def english(self, subject: bool) -> str:  # noqa: ARG002
        return "who" if self.noun.kind in _HUMAN else "that"


@dataclass(frozen=True)
class Adverb:
    """A phrase without inflection: gestern, um halb acht, sehr müde."""

    german: str
    english: str


@dataclass(frozen=True)
class PrepositionPhrase:
    """in + dative where something is, in + accusative where it goes."""

    prepositions: tuple[str, str]
    phrase: NounPhrase
    case: int

    @property
    def german(self) -> str:
        words = f"{self.prepositions[0]} {self.phrase.german(self.case)}"
        for long, short in _CONTRACTIONS.items():
            if words.startswith(long + " "):
                return short + words[len(long) :]
        return words

    @property
    def english(self) -> str:
        plain = self.phrase.determiner == "der" and not self.phrase.adjective
        if self.phrase.noun.german == "Schule" and plain and self.prepositions[1] in ("at", "to"):
            return f"{self.prepositions[1]} school"
        return f"{self.prepositions[1]} {self.phrase.english(subject=False)}"


@dataclass(frozen=True)
class Clause:
    subject: Phrase
    verb: Verb
    tense: Tense = "present"
    modal: Modal | None = None
    negated: bool = False
    dative: Phrase | None = None
    direct: Phrase | None = None
    predicate: Adverb | None = None
    frequency: Adverb | None = None
    time: Adverb | None = None
    reason: Adverb | None = None  # only the question: warum
    place: Adverb | PrepositionPhrase | None = None
    direction: bool = False
    means: Adverb | None = None
    front: Slot = "subject"  # what a main clause opens with
    gap: Slot | None = None  # what is asked for, or stands before as a relative pronoun


@dataclass(frozen=True)
class Sentence:
    main: Clause
    question: bool = False
    conjunction: Adverb | None = None
    second: Clause | None = None  # the subordinate clause
    second_first: bool = False


def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


def _finish(text: str, question: bool) -> str:
    """A capital, a full stop, and no comma before it."""
    text = text.replace(",,", ",").rstrip(",")
    return text[0].upper() + text[1:] + ("?" if question else ".")


# German


def german_sentence(sentence: Sentence) -> str:
    order = "first" if sentence.question and sentence.main.gap is None else "second"
    if sentence.second is None:
        return _finish(german(sentence.main, order), sentence.question)
    link = sentence.conjunction.german if sentence.conjunction else ""
    second = _join(link, german(sentence.second, "last"))
    if sentence.second_first:  # it takes the first place, so the verb of the main clause follows
        return _finish(f"{second}, {german(sentence.main, 'first')}", False)
    return _finish(f"{german(sentence.main, order)}, {second}", sentence.question)


def german(clause: Clause, order: str) -> str:
    """The clause with its finite verb in first, second or last place."""
    finite, prefix, closing = _german_verb(clause)
    middle = _german_middle(clause)
    opening = ""
    if clause.gap or order == "second":
        opening = middle.pop(clause.gap or clause.front)
    inner = _join(*middle.values())
    if order == "last":
        return _join(opening, inner, closing, prefix + finite)
    return _join(opening, finite, inner, closing or prefix)


def _german_verb(clause: Clause) -> tuple[str, str, str]:
    """Finite verb, separable prefix, and what closes the clause: participle or infinitive."""
    verb, form, past = clause.verb, clause.subject.form, clause.tense == "past"
    if clause.modal:
        forms = clause.modal.preterite if past else clause.modal.present
        return forms[form], "", verb.infinitive
    if past and verb.preterite:
        return verb.preterite[form], "", ""
    if past:
        return _AUXILIARIES[verb.auxiliary][form], "", verb.participle
    return verb.present[form], verb.prefix, ""


_AUXILIARIES = {
    "haben": ("habe", "hast", "hat", "haben"),
    "sein": ("bin", "bist", "ist", "sind"),
}


def _german_middle(clause: Clause) -> dict[str, str]:
    """What stands between the finite verb and the closing, in its order.

    Pronouns first; then the time, given objects, "nicht", where, new objects, whereto. A given
    object precedes the time where "nicht" follows: er liest heute das Buch, er liest das Buch
    heute nicht. "kein" is part of its object.
    """
    direct, dative = clause.direct, clause.dative
    nicht = clause.negated and not (isinstance(direct, NounPhrase) and direct.determiner == "kein")
    middle: dict[str, str] = {}

    def put(slot: str, filler: Phrase | Adverb | PrepositionPhrase | None, case: int = 0) -> None:
        if filler is None or slot in middle:
            return
        if isinstance(filler, (Adverb, PrepositionPhrase)):
            middle[slot] = filler.german
        else:
            middle[slot] = filler.german(case)

    def put_direct() -> None:
        if direct is not None and "direct" not in middle:
            case = DATIVE if clause.verb.preposition == "mit" else ACCUSATIVE
            middle["direct"] = _join(clause.verb.preposition, direct.german(case))

    given = not clause.verb.preposition and getattr(direct, "given", True)
    put("subject", clause.subject, NOMINATIVE)
    if isinstance(direct, Pronoun) and given:
        put_direct()
    if isinstance(dative, Pronoun) or nicht:
        put("dative", dative, DATIVE)
    if given and nicht:
        put_direct()
    put("time", clause.time)
    put("reason", clause.reason)
    put("frequency", clause.frequency)
    put("dative", dative, DATIVE)
    if given:
        put_direct()
    if nicht:
        middle["not"] = "nicht"
    if not clause.direction:
        put("place", clause.place)
    put_direct()
    put("means", clause.means)
    put("place", clause.place)
    put("predicate", clause.predicate)
    return middle


# English


def english_sentence(sentence: Sentence) -> str:
    main = english(sentence.main, inverted=sentence.question)
    if sentence.second is None:
        return _finish(main, sentence.question)
    link = sentence.conjunction.english if sentence.conjunction else ""
    second = _join(link, english(sentence.second))
    if sentence.second_first:
        return _finish(f"{second}, {main}", False)
    return _finish(f"{main} {second}", sentence.question)


def english(clause: Clause, inverted: bool = False) -> str:
    """The clause; `inverted` puts the auxiliary before the subject, unless that is asked for."""
    inverted = inverted and clause.gap != "subject"
    auxiliary, rest = _english_verb(clause, inverted or clause.negated)
    opening = ""
    if clause.gap and clause.gap != "subject":
        filler = getattr(clause, clause.gap)
        fixed = isinstance(filler, (Adverb, PrepositionPhrase))
        opening = filler.english if fixed else filler.english(subject=False)
    elif clause.front == "time" and clause.time:
        opening = clause.time.english
    subject = clause.subject.english(subject=True)
    negation = "not" if clause.negated else ""
    if inverted:
        head = _join(auxiliary, subject, negation)
    else:
        head = _join(subject, auxiliary, negation).replace("can not", "cannot")
    frequency = clause.frequency.english if clause.frequency else ""
    time = clause.time.english if clause.time and "time" not in (clause.front, clause.gap) else ""
    place = clause.place.english if clause.place and clause.gap != "place" else ""
    return _join(
        opening,
        head,
        frequency,
        rest,
        _english_objects(clause),
        clause.predicate.english if clause.predicate else "",
        place,
        clause.means.english if clause.means else "",
        time,
    )


def _english_objects(clause: Clause) -> str:
    verb = clause.verb
    dative = clause.dative.english(False) if clause.dative and clause.gap != "dative" else ""
    direct = clause.direct.english(False) if clause.direct and clause.gap != "direct" else ""
    if direct and isinstance(clause.direct, Pronoun):  # picks him up
        return _join(dative, verb.english_preposition, direct, verb.particle)
    return _join(verb.particle, verb.english_preposition, dative, direct)


def _english_verb(clause: Clause, support: bool) -> tuple[str, str]:
    """Auxiliary and the rest of the verb; `support` asks for "do" where there is no auxiliary."""
    verb, form, past = clause.verb, clause.subject.form, clause.tense == "past"
    be = ("was", "were", "was", "were") if past else ("am", "are", "is", "are")
    if clause.modal:
        phrase = clause.modal.english_past if past else clause.modal.english
        head, _, tail = phrase.partition(" ")
        rest = _join(tail, verb.english)
        if head == "be":
            return be[form], rest
        if head in _MODAL_VERBS:
            third, head_past = _MODAL_VERBS[head]
            return _supported(head, third, head_past, clause, support, rest)
        return head, rest
    if clause.tense == "future":
        return "will", verb.english
    if verb.english == "be":
        return be[form], ""
    if clause.tense == "progressive":
        return be[form], verb.ing
    return _supported(verb.english, verb.third, verb.past, clause, support, "")


_MODAL_VERBS = {"have": ("has", "had"), "want": ("wants", "wanted")}


def _supported(
    base: str, third: str, past: str, clause: Clause, support: bool, rest: str
) -> tuple[str, str]:
    """does read, or reads."""
    singular = clause.subject.form == ER
    if support:
        auxiliary = "did" if clause.tense == "past" else "does" if singular else "do"
        return auxiliary, _join(base, rest)
    return "", _join(past if clause.tense == "past" else third if singular else base, rest)
