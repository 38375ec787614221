"""The built-in corpus: its German and English are right, its splits are what they promise."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import pytest

from training import corpus
from training.corpus import MAX_PAIRS, Pair, builtin_corpus, sentence_pairs
from training.grammar import (
    Adverb,
    Clause,
    Name,
    NounPhrase,
    PrepositionPhrase,
    Pronoun,
    RelativePronoun,
    Sentence,
    english_sentence,
    german_sentence,
)
from training.lexicon import (
    ACCUSATIVE,
    DATIVE,
    MODALS,
    NOMINATIVE,
    NOUNS,
    VERBS,
    adjective,
)

CASES = (NOMINATIVE, ACCUSATIVE, DATIVE)


def noun(word: str, determiner: str = "der", quality: str = "", plural: bool = False) -> NounPhrase:
    found = adjective(quality, NOUNS[word]) if quality else None
    return NounPhrase(NOUNS[word], determiner, plural, found)


def both(main: Clause, question: bool = False) -> tuple[str, str]:
    sentence = Sentence(main, question)
    return german_sentence(sentence), english_sentence(sentence)


def joined(main: Clause, link: tuple[str, str], second: Clause, first: bool) -> tuple[str, str]:
    sentence = Sentence(main, False, Adverb(*link), second, first)
    return german_sentence(sentence), english_sentence(sentence)


@pytest.mark.parametrize(
    ("phrase", "german", "english"),
    [
        (noun("Mann", quality="alt"), "der alte Mann|den alten Mann|dem alten Mann", "the old man"),
        (
            noun("Frau", quality="jung"),
            "die junge Frau|die junge Frau|der jungen Frau",
            "the young woman",
        ),
        (noun("Buch", quality="neu"), "das neue Buch|das neue Buch|dem neuen Buch", "the new book"),
        (
            noun("Kind", quality="klein", plural=True),
            "die kleinen Kinder|die kleinen Kinder|den kleinen Kindern",
            "the little children",
        ),
        (
            noun("Apfel", "ein", "rot"),
            "ein roter Apfel|einen roten Apfel|einem roten Apfel",
            "a red apple",
        ),
        (
            noun("Zeitung", "ein", "alt"),
            "eine alte Zeitung|eine alte Zeitung|einer alten Zeitung",
            "an old newspaper",
        ),
        (
            noun("Hemd", "ein", "teuer"),
            "ein teures Hemd|ein teures Hemd|einem teuren Hemd",
            "an expensive shirt",
        ),
        (
            noun("Bruder", "ich", "groß"),
            "mein großer Bruder|meinen großen Bruder|meinem großen Bruder",
            "my big brother",
        ),
        (noun("Tochter", "wir"), "unsere Tochter|unsere Tochter|unserer Tochter", "our daughter"),
        (
            noun("Auto", "er", "blau"),
            "sein blaues Auto|sein blaues Auto|seinem blauen Auto",
            "his blue car",
        ),
        (
            noun("Katze", "sie", "schwarz", True),
            "ihre schwarzen Katzen|ihre schwarzen Katzen|ihren schwarzen Katzen",
            "her black cats",
        ),
        (noun("Hund", "sie+"), "ihr Hund|ihren Hund|ihrem Hund", "their dog"),
        (
            noun("Vogel", "drei", "klein", True),
            "drei kleine Vögel|drei kleine Vögel|drei kleinen Vögeln",
            "three small birds",
        ),
        (noun("Kaffee", "", "heiß"), "heißer Kaffee|heißen Kaffee|heißem Kaffee", "hot coffee"),
        (noun("Milch", "", "kalt"), "kalte Milch|kalte Milch|kalter Milch", "cold milk"),
        (noun("Ei", "kein", "", True), "keine Eier|keine Eier|keinen Eiern", "any eggs"),
        (noun("Ei", "kein"), "kein Ei|kein Ei|keinem Ei", "an egg"),
        (
            noun("Schwester", "Anna", "klein"),
            "Annas kleine Schwester|Annas kleine Schwester|Annas kleiner Schwester",
            "Anna's little sister",
        ),
        (noun("Junge"), "der Junge|den Jungen|dem Jungen", "the boy"),
        (noun("Student", "ein"), "ein Student|einen Studenten|einem Studenten", "a student"),
        (
            noun("Auto", "wie viele", "", True),
            "wie viele Autos|wie viele Autos|wie viele Autos",
            "how many cars",
        ),
    ],
)
def test_articles_and_endings_agree_in_every_case(
    phrase: NounPhrase, german: str, english: str
) -> None:
    assert "|".join(phrase.german(case) for case in CASES) == german
    assert phrase.english(subject=True) == english


def test_the_present_of_er_and_sie_and_of_the_plural() -> None:
    """Regular, with a joining e, with a changed vowel, separable, irregular; -s, -es, -ies."""
    found = {
        name: " ".join((*verb.present, verb.participle, verb.third, verb.past, verb.ing))
        for name, verb in VERBS.items()
        if name in ("spielen", "arbeiten", "lesen", "auf|machen", "ein|laden", "tanzen", "füttern")
        or name in ("kennen", "regnen", "brauchen", "weinen", "schlafen", "auf|räumen", "sitzen")
    }
    assert found == {
        "spielen": "spiele spielst spielt spielen gespielt plays played playing",
        "arbeiten": "arbeite arbeitest arbeitet arbeiten gearbeitet works worked working",
        "lesen": "lese liest liest lesen gelesen reads read reading",
        "auf|machen": "mache machst macht machen aufgemacht opens opened opening",
        "ein|laden": "lade lädst lädt laden eingeladen invites invited inviting",
        "tanzen": "tanze tanzt tanzt tanzen getanzt dances danced dancing",
        "füttern": "füttere fütterst füttert füttern gefüttert feeds fed feeding",
        "kennen": "kenne kennst kennt kennen gekannt knows knew knowing",
        "regnen": "regne regnest regnet regnen geregnet rains rained raining",
        "brauchen": "brauche brauchst braucht brauchen gebraucht needs needed needing",
        "weinen": "weine weinst weint weinen geweint cries cried crying",
        "schlafen": "schlafe schläfst schläft schlafen geschlafen sleeps slept sleeping",
        "auf|räumen": "räume räumst räumt räumen aufgeräumt tidies tidied tidying",
        "sitzen": "sitze sitzt sitzt sitzen gesessen sits sat sitting",
    }


def test_word_order_of_main_clauses() -> None:
    """Verb second, also after a fronted time; prefix, participle and infinitive at the end."""
    he, she, they, i = Pronoun("er"), Pronoun("sie"), Pronoun("sie+"), Pronoun("ich")
    read, book, gestern = VERBS["lesen"], noun("Buch"), Adverb("gestern", "yesterday")
    now, tomorrow = Adverb("jetzt", "now"), Adverb("morgen", "tomorrow")
    window = noun("Fenster")
    got = [
        both(Clause(he, read, direct=book)),
        both(Clause(she, read, direct=book)),
        both(Clause(they, read, direct=book)),
        both(Clause(they, read, "past", direct=book)),
        both(Clause(i, VERBS["auf|machen"], direct=window)),
        both(Clause(he, VERBS["auf|machen"], "progressive", direct=window, time=now)),
        both(Clause(he, VERBS["auf|machen"], "past", direct=window, time=gestern, front="time")),
        both(Clause(she, VERBS["auf|stehen"], "future", time=tomorrow, front="time")),
        both(Clause(she, VERBS["an|kommen"], "past")),
        both(Clause(he, VERBS["ab|holen"], modal=MODALS["müssen"], direct=Pronoun("ich"))),
        both(Clause(he, read, modal=MODALS["können"], direct=book, negated=True)),
        both(Clause(he, read, direct=book, time=Adverb("heute", "today"), negated=True)),
        both(Clause(he, read, "past", direct=noun("Brief", "kein"), negated=True)),
        both(Clause(i, VERBS["geben"], dative=noun("Kind"), direct=noun("Apfel", "ein"))),
        both(Clause(he, VERBS["warten+auf"], direct=noun("Arzt"), negated=True)),
        both(Clause(he, VERBS["spielen+mit"], direct=noun("Hund", plural=True))),
        both(Clause(they, VERBS["helfen"], "past", dative=Pronoun("sie"))),
    ]
    assert got == [
        ("Er liest das Buch.", "He reads the book."),
        ("Sie liest das Buch.", "She reads the book."),
        ("Sie lesen das Buch.", "They read the book."),
        ("Sie haben das Buch gelesen.", "They read the book."),
        ("Ich mache das Fenster auf.", "I open the window."),
        ("Er macht jetzt das Fenster auf.", "He is opening the window now."),
        ("Gestern hat er das Fenster aufgemacht.", "Yesterday he opened the window."),
        ("Morgen steht sie auf.", "Tomorrow she will get up."),
        ("Sie ist angekommen.", "She arrived."),
        ("Er muss mich abholen.", "He has to pick me up."),
        ("Er kann das Buch nicht lesen.", "He cannot read the book."),
        ("Er liest das Buch heute nicht.", "He does not read the book today."),
        ("Er hat keinen Brief gelesen.", "He did not read a letter."),
        ("Ich gebe dem Kind einen Apfel.", "I give the child an apple."),
        ("Er wartet nicht auf den Arzt.", "He does not wait for the doctor."),
        ("Er spielt mit den Hunden.", "He plays with the dogs."),
        ("Sie haben ihr geholfen.", "They helped her."),
    ]


def test_questions_put_the_verb_first_or_after_the_word_asked_for() -> None:
    paul, book, wer = Name("Paul", "er"), noun("Buch"), Pronoun("wer")
    read, help_, why = VERBS["lesen"], VERBS["helfen"], Adverb("warum", "why")
    got = [
        both(Clause(paul, read, direct=book), True),
        both(Clause(paul, read, "past", direct=book), True),
        both(Clause(paul, read, modal=MODALS["dürfen"], direct=book), True),
        both(Clause(wer, read, direct=book, gap="subject"), True),
        both(Clause(paul, read, direct=Pronoun("was"), gap="direct"), True),
        both(Clause(paul, help_, "past", dative=wer, gap="dative"), True),
        both(Clause(paul, VERBS["warten+auf"], direct=wer, gap="direct"), True),
        both(Clause(paul, VERBS["ein|kaufen"], negated=True, reason=why, gap="reason"), True),
    ]
    assert got == [
        ("Liest Paul das Buch?", "Does Paul read the book?"),
        ("Hat Paul das Buch gelesen?", "Did Paul read the book?"),
        ("Darf Paul das Buch lesen?", "Is Paul allowed to read the book?"),
        ("Wer liest das Buch?", "Who reads the book?"),
        ("Was liest Paul?", "What does Paul read?"),
        ("Wem hat Paul geholfen?", "Who did Paul help?"),
        ("Auf wen wartet Paul?", "Who does Paul wait for?"),
        ("Warum kauft Paul nicht ein?", "Why does Paul not go shopping?"),
    ]


def test_subordinate_clauses_put_the_verb_last() -> None:
    anna, she = Name("Anna", "sie"), Pronoun("sie")
    tired = Clause(she, VERBS["sein"], predicate=Adverb("müde", "tired"))
    work = Clause(anna, VERBS["arbeiten"], modal=MODALS["können"], negated=True)
    shop = Clause(she, VERBS["ein|kaufen"])
    bought = Clause(she, VERBS["ein|kaufen"], "past")
    think = Clause(anna, VERBS["glauben"])
    head = NOUNS["Buch"]
    gap = Clause(anna, VERBS["lesen"], "past", direct=RelativePronoun(head, False), gap="direct")
    book = NounPhrase(head, relative=gap)
    who = Clause(RelativePronoun(NOUNS["Mann"], False), VERBS["an|rufen"], direct=anna)
    man = NounPhrase(NOUNS["Mann"], relative=who)
    helped = RelativePronoun(NOUNS["Kind"], True)
    whom = Clause(she, VERBS["helfen"], "past", dative=helped, gap="dative")
    children = NounPhrase(NOUNS["Kind"], plural=True, relative=whom)
    got = [
        joined(work, ("weil", "because"), tired, False),
        joined(shop, ("wenn", "when"), tired, True),
        joined(think, ("dass", "that"), shop, False),
        joined(think, ("dass", "that"), bought, False),
        both(Clause(book, VERBS["sein"], predicate=Adverb("neu", "new"))),
        both(Clause(Pronoun("ich"), VERBS["kennen"], direct=man)),
        both(Clause(Pronoun("wir"), VERBS["kennen"], direct=children)),
    ]
    assert got == [
        (
            "Anna kann nicht arbeiten, weil sie müde ist.",
            "Anna cannot work because she is tired.",
        ),
        ("Wenn sie müde ist, kauft sie ein.", "When she is tired, she goes shopping."),
        ("Anna glaubt, dass sie einkauft.", "Anna thinks that she goes shopping."),
        ("Anna glaubt, dass sie eingekauft hat.", "Anna thinks that she went shopping."),
        ("Das Buch, das Anna gelesen hat, ist neu.", "The book that Anna read is new."),
        ("Ich kenne den Mann, der Anna anruft.", "I know the man who calls Anna."),
        (
            "Wir kennen die Kinder, denen sie geholfen hat.",
            "We know the children who she helped.",
        ),
    ]


def test_location_takes_the_dative_and_direction_the_accusative() -> None:
    got = [
        PrepositionPhrase((german, english), noun(word, quality=quality), case).german
        for german, english, word, quality in (
            ("in", "in", "Garten", ""),
            ("in", "in", "Küche", "alt"),
            ("in", "in", "Haus", "neu"),
            ("auf", "on", "Tisch", ""),
            ("unter", "under", "Bett", ""),
        )
        for case in (DATIVE, ACCUSATIVE)
    ]
    assert got == [
        "im Garten",
        "in den Garten",
        "in der alten Küche",
        "in die alte Küche",
        "im neuen Haus",
        "ins neue Haus",
        "auf dem Tisch",
        "auf den Tisch",
        "unter dem Bett",
        "unter das Bett",
    ]
    assert [
        PrepositionPhrase(("an", "at"), noun("Bahnhof"), DATIVE).german,
        PrepositionPhrase(("zu", "to"), noun("Bahnhof"), DATIVE).german,
        PrepositionPhrase(("in", "at"), noun("Schule"), DATIVE).english,
        PrepositionPhrase(("in", "to"), noun("Schule", quality="neu"), ACCUSATIVE).english,
    ] == ["am Bahnhof", "zum Bahnhof", "at school", "to the new school"]


def test_clock_times() -> None:
    """All 48 that are drawn are found in 2000 draws; German counts the half hour forwards."""
    writer = corpus._Writer(random.Random(0))
    found = {t.german: t.english for t in (writer.clock() for _ in range(2000))}
    assert len(found) == 48
    assert [found[f"um {german}"] for german in ("ein Uhr", "halb eins", "halb acht")] == [
        "at one o'clock",
        "at half past twelve",
        "at half past seven",
    ]
    assert [found[f"um Viertel {german}"] for german in ("nach drei", "vor sechs", "vor eins")] == [
        "at a quarter past three",
        "at a quarter to six",
        "at a quarter to one",
    ]


def test_the_samples_in_the_docstring_are_the_first_test_pairs() -> None:
    pairs = builtin_corpus(0, 0, 8)["test"]
    lines = [line[4:] for line in (corpus.__doc__ or "").splitlines() if line.startswith("    ")]
    assert lines == [text for p in pairs for text in (p["de"], "    " + p["en"])]


def test_the_default_corpus_is_the_same_everywhere() -> None:
    """The hash changes with every word or rule; whoever changes one updates it here."""
    pairs = builtin_corpus()
    assert {name: len(split) for name, split in pairs.items()} == {
        "train": 5000,
        "validation": 1000,
        "test": 100,
    }
    text = json.dumps(pairs, ensure_ascii=False, sort_keys=True).encode()
    expected = "6ef52c4605896cba99d2e3cb98b9b120ba234ba8cb95ef10ee05efa0fb8f9f83"
    assert hashlib.sha256(text).hexdigest() == expected
    assert builtin_corpus(seed=1) != pairs


def test_no_sentence_of_either_language_occurs_twice() -> None:
    splits = builtin_corpus(50_000, 1000, 100)
    pairs: list[Pair] = [*splits["train"], *splits["validation"], *splits["test"]]
    assert len(pairs) == 51_100
    assert len({pair["de"] for pair in pairs}) == 51_100
    assert len({pair["en"] for pair in pairs}) == 51_100


def test_one_german_sentence_has_one_translation() -> None:
    drawn = list(itertools.islice(sentence_pairs(7), 10_000))
    german = {pair["de"] for pair in drawn}
    assert len(german) < 10_000  # some came twice, so that this can fail
    assert len({(pair["de"], pair["en"]) for pair in drawn}) == len(german)


def test_a_larger_training_set_extends_the_smaller_and_leaves_the_others() -> None:
    small, large = builtin_corpus(50, 40, 30), builtin_corpus(500, 40, 30)
    assert large["train"][:50] == small["train"]
    assert (large["validation"], large["test"]) == (small["validation"], small["test"])
    assert builtin_corpus(0, 0, 0) == {"train": [], "validation": [], "test": []}


@pytest.mark.parametrize("name", ["n_train", "n_validation", "n_test"])
def test_a_negative_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=-1: a split has 0 or more pairs, try {name}="):
        builtin_corpus(**{name: -1})


def test_too_many_pairs_are_refused_with_a_number_that_fits() -> None:
    expected = (
        r"n_train=1000000, n_validation=1000, n_test=100 are 1001100 pairs: "
        rf"the grammar gives at most {MAX_PAIRS}, try n_train={MAX_PAIRS - 1100}"
    )
    with pytest.raises(ValueError, match=expected):
        builtin_corpus(1_000_000)
