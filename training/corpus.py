"""A German-English corpus that is always there: drawn from a grammar, no download.

Problem: every course, test and example needs pairs of sentences to train on, on a machine that
may have no network. Idea: draw a clause of the abstract syntax (`training.grammar`) with words
that go together (`training.lexicon`), and spell it out in both languages. Each German sentence
has one translation, and no German or English sentence is returned twice, so the splits share
nothing. Test and validation are drawn first: a larger training set leaves them as they are.

Cost: under 0.1 ms per pair, and two sets of the sentences seen.

    Die Gärten waren sehr ruhig.
        The gardens were very quiet.
    Der Mann kauft das Ei jetzt nicht.
        The man is not buying the egg now.
    Gestern haben wir Anna keine Geschenke gebracht.
        Yesterday we did not bring Anna any presents.
    Wir wollten in die Stadt fahren.
        We wanted to go to the city.
    Hast du vor neun Stunden im Büro neun Kartoffeln gegessen?
        Did you eat nine potatoes at the office nine hours ago?
    Heute Abend wartet Annas kleine Tochter auf dich.
        This evening Anna's little daughter will wait for you.
    Die Nachbarinnen holen immer Peter ab.
        The neighbours always pick up Peter.
    Er hofft, dass der Nachbar morgen nach Hause kommt.
        He hopes that the neighbour will come home tomorrow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from training.grammar import (
    Adverb,
    Clause,
    Name,
    NounPhrase,
    Phrase,
    PrepositionPhrase,
    Pronoun,
    RelativePronoun,
    Sentence,
    Slot,
    Tense,
    english_sentence,
    german_sentence,
)
from training.lexicon import (
    ACCUSATIVE,
    ADJECTIVES,
    ATTRIBUTES,
    CLASSES,
    DATIVE,
    FRAMES,
    MASS,
    MEN,
    MODALS,
    NOMINATIVE,
    NOUNS,
    NUMBERS,
    PLACES,
    POSSESSIVES,
    PREDICATES,
    PREPOSITIONS,
    RELATIONS,
    TRANSPORT,
    VERBS,
    WEEKDAYS,
    WOMEN,
    Adjective,
    Frame,
    Noun,
    adjective,
)

Pair = dict[str, str]  # {"de": ..., "en": ...}

MAX_PAIRS = 200_000  # distinct pairs that every seed yields without running thin


def builtin_corpus(
    n_train: int = 5000, n_validation: int = 1000, n_test: int = 100, seed: int = 1234
) -> dict[str, list[Pair]]:
    """Distinct sentence pairs in three splits: "train", "validation", "test".

    The splits are disjoint in German and in English. The first n_train pairs of a larger
    training set are the smaller one.

    Raises:
        ValueError: a size is negative, or together they exceed MAX_PAIRS.
    """
    sizes = {"n_test": n_test, "n_validation": n_validation, "n_train": n_train}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size}: a split has 0 or more pairs, try {name}=100")
    total = sum(sizes.values())
    if total > MAX_PAIRS:
        rest = MAX_PAIRS - n_validation - n_test
        fix = f"n_train={rest}" if rest >= 0 else "n_train=5000, n_validation=1000, n_test=100"
        raise ValueError(
            f"n_train={n_train}, n_validation={n_validation}, n_test={n_test} are {total} pairs: "
            f"the grammar gives at most {MAX_PAIRS}, try {fix}"
        )
    pairs = _distinct(sentence_pairs(seed))
    splits = {name[2:]: [next(pairs) for _ in range(size)] for name, size in sizes.items()}
    return {name: splits[name] for name in ("train", "validation", "test")}


def sentence_pairs(seed: int) -> Iterator[Pair]:
    """Pairs without end, repetitions included."""
    writer = _Writer(random.Random(seed))
    while True:
        sentence = writer.sentence()
        yield {"de": german_sentence(sentence), "en": english_sentence(sentence)}


def _distinct(pairs: Iterator[Pair]) -> Iterator[Pair]:
    german: set[str] = set()
    english: set[str] = set()
    for pair in pairs:
        if pair["de"] not in german and pair["en"] not in english:
            german.add(pair["de"])
            english.add(pair["en"])
            yield pair


# Frames by use. Accidents ("he is losing his key now") happen only in the past.
_HUMAN_FRAMES = tuple(f for f in FRAMES if f.subject in ("human", "grown"))
_PASSIVE = {"schlafen", "sitzen", "bleiben", "weinen", "lachen", "ankommen", "kommen", "aufstehen"}
_EFFORTS = tuple(
    f for f in _HUMAN_FRAMES if f.habit and f.verb.infinitive not in _PASSIVE | {"warten"}
)
_KINDNESS = tuple(f for f in FRAMES if f.verb.infinitive in {"helfen", "schicken", "geben"})
_ACQUIRED = {"kaufen", "schreiben", "lesen", "finden", "malen", "mitbringen", "backen", "schicken"}
_MADE = tuple(f for f in FRAMES if f.verb.infinitive in _ACQUIRED)
_NO_MODAL = {"weinen", "lachen", "danken", "folgen", "sitzen", "ankommen"}
_HUMAN = ("human", "grown", "child")  # subject classes of which a pronoun or a name will do
_ACCIDENTS = {"verlieren", "vergessen"}
_EARLY = {"aufstehen", "frühstücken"}
_UNPLANNED = {"weinen", "lachen"}
_PURPOSES = {
    "Supermarkt": ("kaufen", "groceries"),
    "Stadt": ("kaufen", "goods"),
    "Bibliothek": ("lesen", "text"),
    "Restaurant": ("essen", "lunch"),
    "Büro": ("arbeiten", ""),
    "Küche": ("kochen", "cooking"),
    "Garten": ("malen", "motif"),
    "Park": ("spielen", ""),
    "Bahnhof": ("abholen", "human"),
    "Zimmer": ("schlafen", ""),
}
_MEASURABLE = {"teuer", "heiß", "kalt", "lang", "klein", "groß", "müde", "kurz"}
_ONE_OF_MANY = {"Restaurant", "Museum", "Park", "Krankenhaus", "Haus"}
_RELATED = {"stehen": (2, 5), "stellen": (2, 5), "legen": (0, 3), "liegen": (0, 3)}  # RELATIONS
_OFTEN = (
    Adverb("oft", "often"),
    Adverb("immer", "always"),
    Adverb("manchmal", "sometimes"),
    Adverb("nie", "never"),
)
_HOURS = {"ein": "one"} | {word: NUMBERS[word] for word in tuple(NUMBERS)[:11]}
_CLOCK = tuple(_HOURS)


class _Writer:
    """Draws sentences. All choices come from the one generator, in the order of the calls."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # Phrases

    def name(self, but: str = "", single: bool = False) -> Name:
        names = [name for name in MEN + WOMEN if name not in but.split()]
        if not single and self.chance(0.15):
            pair = self.rng.sample(names, 2)
            return Name(" und ".join(pair), "sie+")
        word = self.rng.choice(names)
        return Name(word, "er" if word in MEN else "sie")

    def subject(self, of: str = "human", known: bool = False, asking: bool = False) -> Phrase:
        """`known` leaves out the indefinite ones, `asking` also the first person."""
        if of in _HUMAN:
            draw = self.rng.random()
            if draw < 0.25:
                keys = ("ich", "du", "er", "sie", "wir", "sie+")
                asked = ("du", "du", "er", "sie", "sie+")
                return Pronoun(self.rng.choice(asked if asking else keys))
            if draw < 0.45:
                return self.name()
        noun = self.noun(of)
        if noun.kind in ("adult", "youth", "family", "elder"):
            return self.person(noun, ("ich", "du", "er", "sie", "wir"), known)
        owners = ("der",) if of == "owned" else ("der", "der", "ich", "wir", "Anna", "Paul")
        determiner = self.rng.choice(owners)
        plural = noun.kind == "animal" and determiner == "der" and self.chance(0.3)
        if noun.kind == "animal" and not plural and not known and self.chance(0.3):
            determiner = "ein"
        return NounPhrase(noun, determiner, plural, self.attribute(noun, 0.2))

    def person(self, noun: Noun, owners: Sequence[str], known: bool, but: str = "") -> NounPhrase:
        quality = self.attribute(noun, 0.25)
        plural = bool(noun.plural) and self.chance(0.2)
        if noun.kind in ("family", "elder"):
            owner = self.rng.choice((*owners, self.name(but, single=True).words))
            return NounPhrase(noun, owner, plural, quality)
        if plural and not known and self.chance(0.5):
            number = self.rng.choice(("zwei", "drei", "vier", "fünf"))
            return NounPhrase(noun, number, True, quality)
        if not plural and not known and self.chance(0.2):
            return NounPhrase(noun, "ein", False, quality)
        return NounPhrase(noun, "der", plural, quality)

    def human_object(self, subject: Phrase, case: int) -> Phrase:
        draw = self.rng.random()
        if draw < 0.2:
            others = {"ich": ["er", "du"], "du": ["ich", "er"], "wir": ["du", "er"]}
            keys = others.get(subject.owner, ["ich", "du", "wir", "er"])
            if case == DATIVE:
                keys += ["sie", "sie+"]
            return Pronoun(self.rng.choice(keys))
        if draw < 0.45:
            return self.name(but=subject.german(NOMINATIVE))
        noun = self.other("human", subject)
        known, but = self.chance(0.7), subject.german(NOMINATIVE)
        owners = self.owners(subject)
        if getattr(getattr(subject, "noun", None), "kind", "") == "youth":
            owners = owners[:3]  # a boy has no sons
        return self.person(noun, owners, known, but)

    def owners(self, subject: Phrase) -> tuple[str, ...]:
        """Whose things a clause about this subject speaks of: mostly its own."""
        own = (subject.owner,) * 4 if subject.owner in POSSESSIVES else ()
        return ("ich", "du", "wir", *own)

    def noun(self, of: str) -> Noun:
        return NOUNS[self.rng.choice(CLASSES[of])]

    def other(self, of: str, subject: Phrase) -> Noun:
        """A noun that is not the subject's own: no chair stands beside the chair."""
        noun = self.noun(of)
        while noun == getattr(subject, "noun", None):
            noun = self.noun(of)
        return noun

    def attribute(self, noun: Noun, probability: float) -> Adjective | None:
        words = ATTRIBUTES.get(noun.german) or ATTRIBUTES.get(noun.kind)
        if not words or not self.chance(probability):
            return None
        return adjective(self.rng.choice(words.split()), noun)

    def thing(self, of: str, subject: Phrase, counted: bool, negated: bool) -> NounPhrase:
        noun = self.other(of, subject)
        indefinite = "kein" if negated else "ein"
        if noun.kind == "abstract":
            return NounPhrase(noun, "kein" if negated else "")
        quality = self.attribute(noun, 0.3)
        draw = self.rng.random() * (0.55 if of == "possession" else 1)
        if noun.kind in ("room", "public") and of in ("sight", "tidyable", "cleanable", "shown"):
            draw = 0.55 + 0.45 * draw  # a known one
        if noun.kind in MASS:
            if draw < 0.6:
                return NounPhrase(noun, "kein" if negated else "", False, quality)
        elif counted and draw < 0.3:
            if negated:
                return NounPhrase(noun, "kein", True, quality)
            several = tuple(NUMBERS) if noun.kind == "food" else tuple(NUMBERS)[:5]
            bare = draw < 0.1 and noun.german != noun.plural  # Kuchen: cake, or cakes?
            number = "" if bare else self.rng.choice(several)
            return NounPhrase(noun, number, True, quality)
        elif draw < 0.55:
            return NounPhrase(noun, indefinite, False, quality)
        owned = noun.kind not in ("opening", "furniture", "public", "dish", "animal")
        owned = owned and of not in ("fodder", "Wasser", "groceries", "goods")
        if owned and draw > 0.8:
            return NounPhrase(noun, self.rng.choice(self.owners(subject)), False, quality)
        return NounPhrase(noun, "der", False, quality)

    # Adverbials

    def place(self, frame: Frame, subject: Phrase) -> Adverb | PrepositionPhrase:
        word = self.rng.choice(CLASSES.get(frame.place, (frame.place,)))
        if word in PLACES:
            return Adverb(*PLACES[word][frame.direction])
        case = ACCUSATIVE if frame.direction else DATIVE
        noun = NOUNS[word]
        if frame.place in ("furniture", "parking"):
            noun = self.other(frame.place, subject)
            first, last = _RELATED.get(frame.verb.infinitive, (0, len(RELATIONS)))
            relation = self.rng.choice(RELATIONS[first:last])
            return PrepositionPhrase(relation, NounPhrase(noun), case)
        prepositions = PREPOSITIONS[word][2:] if frame.direction else PREPOSITIONS[word][:2]
        case = DATIVE if prepositions[0] == "zu" else case
        quality = self.attribute(noun, 0.15)
        determiner = "der"
        if noun.kind == "room" and (self.chance(0.35) or word == "Haus"):
            determiner = self.rng.choice(self.owners(subject))
        home = word == "Haus" and frame.place == "home"
        if home or (quality and word in _ONE_OF_MANY and self.chance(0.4)):
            quality, determiner = quality or self.attribute(noun, 1.0), "ein"
        phrase = NounPhrase(noun, determiner, False, quality)
        return PrepositionPhrase((prepositions[0], prepositions[1]), phrase, case)

    def clock(self) -> Adverb:
        index = self.rng.randrange(12)
        hour = _CLOCK[index]
        spoken = "eins" if hour == "ein" else hour
        before = _HOURS[_CLOCK[index - 1]]
        return self.rng.choice(
            (
                Adverb(f"um {hour} Uhr", f"at {_HOURS[hour]} o'clock"),
                Adverb(f"um halb {spoken}", f"at half past {before}"),
                Adverb(f"um Viertel nach {spoken}", f"at a quarter past {_HOURS[hour]}"),
                Adverb(f"um Viertel vor {spoken}", f"at a quarter to {_HOURS[hour]}"),
            )
        )

    def time(self, tense: Tense, small: bool = False, clocked: bool = True) -> Adverb:
        """A time that asks for this tense; a small matter is not said of next week."""
        day = self.rng.choice(tuple(WEEKDAYS))
        weekday = Adverb(f"am {day}", f"on {WEEKDAYS[day]}")
        number = self.rng.choice(tuple(NUMBERS)[:9])
        unit, units = self.rng.choice((("Tagen", "days"), ("Wochen", "weeks")))
        if tense == "progressive":
            return self.rng.choice((Adverb("jetzt", "now"), Adverb("heute", "today")))
        choices = [weekday]
        if tense == "future":
            choices += [Adverb("morgen", "tomorrow"), Adverb("heute Abend", "this evening")]
            if not small:
                choices.append(Adverb("nächste Woche", "next week"))
                choices.append(Adverb(f"in {number} {unit}", f"in {NUMBERS[number]} {units}"))
        elif tense == "past":
            choices += [Adverb("gestern", "yesterday")]
            choices += [Adverb("gestern Abend", "yesterday evening")]
            if small:
                unit, units = "Stunden", "hours"
            else:
                choices.append(Adverb("letzte Woche", "last week"))
            choices.append(Adverb(f"vor {number} {unit}", f"{NUMBERS[number]} {units} ago"))
        else:
            choices = [
                Adverb("jeden Tag", "every day"),
                Adverb("jeden Morgen", "every morning"),
                Adverb(f"jeden {day}", f"every {WEEKDAYS[day]}"),
                Adverb("am Abend", "in the evening"),
            ]
            if not small:
                choices.append(Adverb("im Sommer", "in summer"))
        chosen = self.rng.choice(choices)
        clock = self.clock()
        if not clocked:
            return chosen
        if chosen.german in ("morgen", "gestern", "jeden Tag", weekday.german):
            if self.chance(0.3):
                return Adverb(
                    f"{chosen.german} {clock.german}", f"{chosen.english} {clock.english}"
                )
        elif tense in ("past", "present") and self.chance(0.2):
            return clock
        return chosen

    # Clauses

    def clause(
        self,
        frame: Frame,
        subject: Phrase,
        tense: Tense | None = None,
        timed: bool = True,
        modal: bool = True,
        negated: bool | None = None,
    ) -> Clause:
        """A clause of this frame; what is not given is drawn."""
        if frame.state and isinstance(subject, NounPhrase) and not subject.given:
            subject = replace(subject, determiner="der")
        if frame.verb.infinitive in _ACCIDENTS:
            negated = False
        if negated is None:
            negated = self.definite(subject) and self.chance(0.15)
        clause = Clause(subject, frame.verb, negated=negated, direction=frame.direction)
        if frame.dative:
            dative = self.human_object(subject, DATIVE)
            clause = replace(clause, dative=dative)
        if frame.direct:
            clause = replace(clause, direct=self.direct(frame, clause))
        if frame.place and (frame.place_required or self.chance(0.3)):
            clause = replace(clause, place=self.place(frame, subject))
        if frame.place == "journey" and self.chance(0.6):
            clause = replace(clause, means=Adverb(*self.rng.choice(TRANSPORT)))
        if frame.state:
            return clause
        return self.timed(frame, clause, tense, timed, modal)

    def direct(self, frame: Frame, clause: Clause) -> Phrase:
        if frame.direct in ("human", "relative"):
            person = self.human_object(clause.subject, ACCUSATIVE)
            while frame.direct == "relative" and getattr(person, "noun", None) is None:
                person = self.human_object(clause.subject, ACCUSATIVE)
            new = isinstance(person, NounPhrase) and not person.given
            if isinstance(person, NounPhrase) and new and (clause.negated or frame.state):
                return replace(person, determiner="der")
            return person
        if frame.state and frame.direct == "animal":
            owner = self.rng.choice(("der", *self.owners(clause.subject)))
            return NounPhrase(self.noun("animal"), owner)
        return self.thing(frame.direct, clause.subject, frame.counted, clause.negated)

    def definite(self, phrase: Phrase) -> bool:
        return not isinstance(phrase, NounPhrase) or phrase.given

    def timed(
        self, frame: Frame, clause: Clause, asked: Tense | None, timed: bool, modal: bool
    ) -> Clause:
        """Tense, modal, time and what opens the clause."""
        new = isinstance(clause.direct, NounPhrase) and not clause.direct.given
        habit = frame.habit and (new or not frame.habit_if_indefinite)
        tenses: tuple[Tense, ...] = ("present", "progressive", "future", "past", "past")
        drawn: Tense = self.rng.choice(tenses)
        tense = asked or drawn
        if frame.past_only:
            tense = "past"
        verb = clause.verb.infinitive
        if tense == "future" and verb in _UNPLANNED:
            tense = "past"
        able = modal and not frame.past_only and frame.subject in _HUMAN and verb not in _NO_MODAL
        if able and tense in ("present", "past") and self.chance(0.35):
            return self.with_modal(frame, clause, tense, timed)
        clause = replace(clause, tense=tense)
        if not timed and tense in ("present", "past"):
            return clause
        if tense == "present":
            if not habit or clause.negated or self.chance(0.15):
                return clause
            if self.chance(0.5):
                return replace(clause, frequency=self.rng.choice(_OFTEN))
        elif tense == "past" and self.chance(0.35):
            return clause
        return self.opened(replace(clause, time=self.fitting_time(frame, tense)))

    def fitting_time(self, frame: Frame, tense: Tense) -> Adverb:
        """Animals keep no clock, and nobody gets up in the evening."""
        clocked = frame.subject in _HUMAN
        time = self.time(tense, frame.small, clocked)
        while frame.verb.infinitive in _EARLY and "Abend" in time.german:
            time = self.time(tense, frame.small, clocked)
        return time

    def with_modal(self, frame: Frame, clause: Clause, tense: Tense, timed: bool) -> Clause:
        modals = [m for m in MODALS.values() if tense == "present" or m.preterite]
        clause = replace(clause, tense=tense, modal=self.rng.choice(modals))
        if not timed or self.chance(0.5):
            return clause
        time = self.fitting_time(frame, "future" if tense == "present" else tense)
        return self.opened(replace(clause, time=time))

    def opened(self, clause: Clause) -> Clause:
        if clause.time and self.chance(0.4):
            return replace(clause, front="time")
        if clause.place and not clause.direction and self.chance(0.1):
            return replace(clause, front="place")
        return clause

    # Sentences

    def sentence(self) -> Sentence:
        kinds = (
            (self.statement, 40),
            (self.yes_no_question, 9),
            (self.wh_question, 11),
            (self.report, 12),
            (self.reason, 10),
            (self.condition, 6),
            (self.relative, 6),
            (self.description, 5),
            (self.weather, 1),
        )
        return self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()

    def statement(self) -> Sentence:
        frame = self.rng.choice(FRAMES)
        return Sentence(self.clause(frame, self.subject(frame.subject)))

    def yes_no_question(self) -> Sentence:
        frame = self.rng.choice(FRAMES)
        subject = self.subject(frame.subject, known=True, asking=True)
        clause = self.clause(frame, subject, negated=False)
        return Sentence(replace(clause, front="subject"), question=True)

    def wh_question(self) -> Sentence:
        return Sentence(self.asking(self.rng.choice(_HUMAN_FRAMES)), question=True)

    def asking(self, frame: Frame) -> Clause:
        """A clause with one slot asked for."""
        slots: list[Slot] = ["subject"]
        thing = frame.direct != "animal" and not frame.verb.preposition
        if frame.direct == "human" or (frame.direct and thing):
            slots += ["direct", "direct"]
        elif frame.dative and not frame.direct:
            slots += ["dative", "dative"]
        if frame.place:
            slots.append("place")
        if not frame.state:
            slots += ["time", "reason"]
        gap = self.rng.choice(slots)
        if gap == "subject":
            clause = self.clause(frame, Pronoun("wer"), negated=False)
            return replace(clause, gap="subject", front="subject", frequency=None)
        subject = self.subject("human", known=True, asking=True)
        negated = gap == "reason" and self.chance(0.4)
        tense: Tense = self.rng.choice(("present", "past"))
        clause = self.clause(frame, subject, tense, timed=gap == "direct", negated=negated)
        clause = replace(clause, gap=gap, front="subject", frequency=None)
        if gap == "direct":
            return replace(clause, direct=self.asked(frame))
        if gap == "dative":
            return replace(clause, dative=Pronoun("wer"))
        if gap == "place":
            word = Adverb("wohin" if frame.direction else "wo", "where")
            return replace(clause, place=word, means=None)
        if gap == "time":
            return replace(clause, time=Adverb("wann", "when"))
        return replace(clause, reason=Adverb("warum", "why"))

    def asked(self, frame: Frame) -> Phrase:
        if frame.direct in ("human", "relative"):
            return Pronoun("wer")
        if frame.counted and self.chance(0.7):
            noun = self.noun(frame.direct)
            if noun.plural:
                return NounPhrase(noun, "wie viele", True, self.attribute(noun, 0.3))
        return Pronoun("was")

    def report(self) -> Sentence:
        """Ich glaube, dass ...; er fragt, ob ...; wir wissen nicht, wo ..."""
        kind = self.rng.randrange(6)
        frame = self.rng.choice(FRAMES)
        subject = self.subject(known=True)
        verb, link = (
            ("glauben", Adverb("dass", "that")),
            ("wissen", Adverb("dass", "that")),
            ("sagen", Adverb("dass", "that")),
            ("hoffen", Adverb("dass", "that")),
            ("fragen", Adverb("ob", "whether")),
            ("wissen", Adverb("ob", "whether")),
        )[kind]
        main = Clause(subject, VERBS[verb], negated=kind == 5)
        if kind == 5 and self.chance(0.5):
            return Sentence(main, second=self.asking(self.rng.choice(_HUMAN_FRAMES)))
        if kind == 3:
            while frame.state or frame.past_only:
                frame = self.rng.choice(FRAMES)
        tense: Tense | None = "future" if kind == 3 else None
        about = self.subject(frame.subject, known=True)
        while about == subject:
            about = self.subject(frame.subject, known=True)
        second = replace(self.clause(frame, about, tense), front="subject")
        return Sentence(main, conjunction=link, second=second)

    def resumable(self) -> Phrase:
        """A subject that a pronoun can take up again."""
        subject = self.subject("human", known=True)
        while subject.owner == "es":
            subject = self.subject("human", known=True)
        return subject

    def being(self, subject: Phrase, words: str, tense: Tense = "present") -> Clause:
        chosen = self.rng.choice(words.split())
        word = ADJECTIVES[chosen]
        if isinstance(subject, NounPhrase):
            word = adjective(chosen, subject.noun)
        quality = Adverb(word.german, word.english)
        return Clause(subject, VERBS["sein"], tense, predicate=quality)

    def reason(self) -> Sentence:
        build = self.rng.choice((self.excuse, self.effort, self.purpose, self.feeling))
        return build()

    def excuse(self) -> Sentence:
        """Er kann nicht arbeiten, weil er krank ist."""
        subject = self.resumable()
        again = Pronoun(subject.owner)
        frame = self.rng.choice(_EFFORTS)
        main = self.clause(frame, subject, "present", False, modal=False, negated=True)
        tense: Tense = self.rng.choice(("present", "past"))
        modal = MODALS["können"] if self.chance(0.6) else None
        main = replace(main, tense=tense, modal=modal)
        if self.chance(0.5):
            second = self.being(again, "krank müde", tense)
        else:
            time = NounPhrase(NOUNS["Zeit"], "kein")
            second = Clause(again, VERBS["haben"], tense, negated=True, direct=time)
        return self.swapped(main, Adverb("weil", "because"), second)

    def effort(self) -> Sentence:
        """Sie arbeitet, obwohl sie müde ist."""
        subject = self.resumable()
        again = Pronoun(subject.owner)
        tense: Tense = self.rng.choice(("present", "past"))
        frame = self.rng.choice(_EFFORTS)
        main = self.clause(frame, subject, tense, False, modal=False, negated=False)
        second = self.being(again, "krank müde hungrig", tense)
        if tense == "present" and self.chance(0.4):
            rain = VERBS[self.rng.choice(("regnen", "schneien"))]
            second = Clause(Pronoun("es"), rain, "progressive")
        return self.swapped(main, Adverb("obwohl", "although"), second)

    def purpose(self) -> Sentence:
        """Sie geht in die Bibliothek, weil sie ein Buch lesen will."""
        subject = self.resumable()
        word = self.rng.choice(tuple(_PURPOSES))
        verb, objects = _PURPOSES[word]
        walk = next(f for f in FRAMES if f.verb.infinitive == "gehen")
        there = replace(walk, place=word)
        tense: Tense = self.rng.choice(("present", "past"))
        main = replace(self.clause(there, subject, tense, modal=False, negated=False))
        frame = next(f for f in FRAMES if f.verb.infinitive == verb)
        frame = replace(frame, direct=objects, place="", counted=False)
        again = Pronoun(subject.owner)
        second = self.clause(frame, again, tense, False, modal=False, negated=False)
        modal = MODALS[self.rng.choice(("wollen", "müssen"))]
        second = replace(second, modal=modal)
        return Sentence(main, conjunction=Adverb("weil", "because"), second=second)

    def feeling(self) -> Sentence:
        """Er ist glücklich, weil Anna ihm ein Buch geschickt hat."""
        subject = self.resumable()
        link = Adverb("weil", "because")
        if self.chance(0.4):
            lost = next(f for f in FRAMES if f.verb.infinitive == "verlieren")
            again = Pronoun(subject.owner)
            second = self.clause(lost, again, negated=False, timed=False)
            return Sentence(self.being(subject, "traurig"), conjunction=link, second=second)
        giver = self.subject("human", known=True)
        while giver.owner == subject.owner or isinstance(giver, Pronoun):
            giver = self.subject("human", known=True)
        frame = self.rng.choice(_KINDNESS)
        second = self.clause(frame, giver, "past", modal=False, negated=False)
        second = replace(second, dative=Pronoun(subject.owner), front="subject")
        return Sentence(self.being(subject, "glücklich"), conjunction=link, second=second)

    def swapped(self, main: Clause, link: Adverb, second: Clause) -> Sentence:
        """The subordinate clause first, at times; the noun then stands in it."""
        main = replace(main, front="subject")
        if self.chance(0.6) or second.subject.owner == "es":
            return Sentence(main, conjunction=link, second=second)
        main, second = (
            replace(main, subject=second.subject),
            replace(second, subject=main.subject),
        )
        return Sentence(main, conjunction=link, second=second, second_first=True)

    def condition(self) -> Sentence:
        """Wenn es regnet, ...; wenn Anna Zeit hat, ..."""
        subject = self.resumable()
        frame = self.rng.choice(_EFFORTS)
        link = Adverb("wenn", "when")
        main = self.clause(frame, subject, "present", False, negated=False)
        main = replace(main, front="subject")
        if self.chance(0.5):
            rain = VERBS[self.rng.choice(("regnen", "schneien"))]
            weather = Clause(Pronoun("es"), rain)
            if self.chance(0.4):
                weather = self.being(NounPhrase(NOUNS["Wetter"]), "schön kalt")
            return Sentence(main, False, link, weather, second_first=self.chance(0.6))
        time = NounPhrase(NOUNS["Zeit"], "")
        second = Clause(Pronoun(subject.owner), VERBS["haben"], direct=time)
        return self.swapped(main, link, second)

    def relative(self) -> Sentence:
        """Das Buch, das Anna gekauft hat, ist interessant. Ich kenne den Mann, der dort wohnt."""
        if self.chance(0.5):
            frame = self.rng.choice(_MADE)
            noun = self.noun(frame.direct)
            while not noun.plural:
                noun = self.noun(frame.direct)
            subject = self.subject("human", known=True)
            clause = self.clause(frame, subject, "past", negated=False, modal=False)
            clause = replace(clause, front="subject", gap="direct")
            clause = replace(clause, direct=RelativePronoun(noun, False))
            return Sentence(self.described(NounPhrase(noun, relative=clause)))
        frame = self.rng.choice(_HUMAN_FRAMES)
        noun = self.noun("adult" if frame.subject == "grown" else "person")
        plural = self.chance(0.2)
        clause = self.clause(frame, RelativePronoun(noun, plural), negated=False)
        clause = replace(clause, gap="subject", front="subject")
        head = NounPhrase(noun, "der", plural, relative=clause)
        if self.chance(0.5):
            return Sentence(self.described(head))
        knower = self.subject("human", known=True)
        return Sentence(Clause(knower, VERBS["kennen"], direct=head))

    def described(self, phrase: NounPhrase, tense: Tense = "present") -> Clause:
        noun = phrase.noun
        words = (PREDICATES.get(noun.german) or PREDICATES[noun.kind]).split()
        word = adjective(self.rng.choice(words), noun)
        quality = Adverb(word.german, word.english)
        negated = phrase.relative is None and self.chance(0.2)
        if self.chance(0.3):
            quality = Adverb(f"sehr {word.german}", f"very {word.english}")
        elif word.german in _MEASURABLE and self.chance(0.3):
            quality = Adverb(f"zu {word.german}", f"too {word.english}")
        return Clause(phrase, VERBS["sein"], tense, negated=negated, predicate=quality)

    def description(self) -> Sentence:
        of = self.rng.choice([kind for kind in PREDICATES if kind in CLASSES])
        noun = self.noun(of)
        if noun.kind in ("family", "elder"):
            phrase = self.person(noun, ("ich", "du", "er", "sie", "wir"), known=True)
            phrase = replace(phrase, adjective=None)
        else:
            plural = bool(noun.plural) and self.chance(0.25)
            phrase = NounPhrase(noun, "der", plural)
            if noun.kind not in ("public", "adult", "youth") and self.chance(0.4):
                phrase = replace(phrase, determiner=self.rng.choice(tuple(POSSESSIVES)[:5]))
        tense: Tense = self.rng.choice(("present", "present", "past"))
        clause = self.described(phrase, tense)
        if tense == "past" and of in ("adult", "youth", "family", "elder") and self.chance(0.5):
            clause = self.opened(replace(clause, time=self.time("past", small=True, clocked=False)))
        return Sentence(clause, question=self.chance(0.15) and clause.front == "subject")

    def weather(self) -> Sentence:
        tense: Tense = self.rng.choice(("present", "progressive", "future", "past"))
        verb = VERBS[self.rng.choice(("regnen", "schneien"))]
        place = None
        if self.chance(0.7):
            place = Adverb(*PLACES[self.rng.choice(("Berlin", "Hamburg", "Wien", "München"))][0])
        clause = Clause(
            Pronoun("es"),
            verb,
            tense,
            place=place,
            time=self.time(tense, small=True, clocked=False),
        )
        return Sentence(self.opened(clause))
