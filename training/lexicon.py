"""The words of the built-in corpus, and how each of them is inflected.

Problem: some 200 words are known by heart (gender, plural, vowel change, participle), and all
their other forms follow from rules. So the words are tables of text that list what is irregular,
and the rules are the methods and functions below them; `-` in a table means "by the rule".
Which words go together (one reads a letter, one does not read a loaf) is a table too: `FRAMES`.

Case is one of NOMINATIVE, ACCUSATIVE, DATIVE. Of the persons four forms suffice in both
languages, because wir and sie share theirs: ICH, DU, ER, WIR (they, and all plurals).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NOMINATIVE, ACCUSATIVE, DATIVE = range(3)
ICH, DU, ER, WIR = range(4)

# Gender, singular, plural, English, English plural. m* marks the nouns that take -n in all cases
# but the nominative (der Junge, den Jungen); a missing plural is one that is never used.
_NOUNS = {
    "adult": """
        m  Mann      Männer       man       men
        f  Frau      Frauen       woman     women
        m  Lehrer    Lehrer       teacher   -
        f  Lehrerin  Lehrerinnen  teacher   -
        m  Arzt      Ärzte        doctor    -
        f  Ärztin    Ärztinnen    doctor    -
        m* Nachbar   Nachbarn     neighbour -
        f  Nachbarin Nachbarinnen neighbour -
        m* Student   Studenten    student   -
        f  Studentin Studentinnen student   -
    """,
    "youth": """
        n  Kind      Kinder       child     children
        n  Mädchen   Mädchen      girl      -
        m* Junge     Jungen       boy       -
    """,
    "family": """
        m  Bruder    Brüder       brother   -
        f  Schwester Schwestern   sister    -
        m  Sohn      Söhne        son       -
        f  Tochter   Töchter      daughter  -
    """,
    "elder": """
        m  Vater     -            father    -
        f  Mutter    -            mother    -
        m  Onkel     -            uncle     -
        f  Tante     -            aunt      -
    """,
    "animal": """
        m  Hund      Hunde        dog       -
        f  Katze     Katzen       cat       -
        n  Pferd     Pferde       horse     -
        m  Vogel     Vögel        bird      -
    """,
    "text": """
        n  Buch      Bücher       book      -
        f  Zeitung   Zeitungen    newspaper -
        m  Brief     Briefe       letter    -
        f  Geschichte Geschichten story     -
    """,
    "food": """
        m  Apfel     Äpfel        apple     -
        f  Orange    Orangen      orange    -
        n  Ei        Eier         egg       -
        f  Tomate    Tomaten      tomato    -
        f  Kartoffel Kartoffeln   potato    -
        m  Kuchen    Kuchen       cake      -
    """,
    "dish": """
        n  Brot      -            bread     -
        m  Käse      -            cheese    -
        m  Reis      -            rice      -
        f  Suppe     -            soup      -
    """,
    "drink": """
        n  Wasser    -            water     -
        f  Milch     -            milk      -
        m  Kaffee    -            coffee    -
        m  Tee       -            tea       -
    """,
    "clothes": """
        n  Hemd      Hemden       shirt     -
        m  Mantel    Mäntel       coat      -
        m  Pullover  Pullover     sweater   -
        f  Jacke     Jacken       jacket    -
        m  Hut       Hüte         hat       -
    """,
    "vehicle": """
        n  Auto      Autos        car       -
        n  Fahrrad   Fahrräder    bicycle   -
    """,
    "thing": """
        m  Schlüssel Schlüssel    key       -
        f  Tasche    Taschen      bag       -
        n  Bild      Bilder       picture   -
        f  Lampe     Lampen       lamp      -
        m  Ball      Bälle        ball      -
        n  Geschenk  Geschenke    present   -
        f  Blume     Blumen       flower    -
    """,
    "opening": """
        n  Fenster   Fenster      window    -
        f  Tür       Türen        door      -
    """,
    "furniture": """
        m  Tisch     Tische       table     -
        m  Stuhl     Stühle       chair     -
        n  Bett      Betten       bed       -
    """,
    "room": """
        m  Garten    Gärten       garden    -
        f  Küche     Küchen       kitchen   -
        n  Zimmer    Zimmer       room      -
        n  Büro      Büros        office    -
        n  Haus      Häuser       house     -
    """,
    "public": """
        f  Schule    Schulen      school    -
        m  Park      Parks        park      -
        n  Museum    Museen       museum    -
        n  Restaurant Restaurants restaurant -
        f  Bibliothek Bibliotheken library  -
        m  Supermarkt Supermärkte supermarket -
        m  Bahnhof   Bahnhöfe     station   -
        n  Krankenhaus Krankenhäuser hospital -
        m  Wald      Wälder       forest    -
        f  Stadt     Städte       city      -
    """,
    "abstract": """
        f  Zeit      -            time      -
        n  Wetter    -            weather   -
    """,
}
MASS = {"dish", "drink", "abstract"}

# German, what follows it in inflection where that differs, English.
_ADJECTIVES = """
    alt - old           jung - young        klein - small       groß - big
    neu - new           schön - beautiful   freundlich - friendly
    müde müd tired      krank - sick        glücklich - happy   traurig - sad
    hungrig - hungry    rot - red           blau - blue         grün - green
    schwarz - black     weiß - white        teuer teur expensive
    billig - cheap      interessant - interesting               lang - long
    kurz - short        langweilig - boring frisch - fresh      kalt - cold
    heiß - hot          süß - sweet         ruhig - quiet       schmutzig - dirty
    schnell - fast
"""
# Where English has another word for some nouns.
_SPECIAL_ADJECTIVES = {
    ("groß", "adult"): "tall",
    ("klein", "youth"): "little",
    ("klein", "family"): "little",
    ("schön", "abstract"): "nice",
}
ATTRIBUTES = {
    "adult": "alt jung freundlich groß",
    "youth": "klein freundlich müde",
    "family": "klein groß",
    "Sohn": "klein",
    "Tochter": "klein",
    "Onkel": "alt",
    "Tante": "alt",
    "animal": "klein groß alt schwarz weiß müde",
    "text": "interessant lang kurz alt neu langweilig",
    "food": "frisch groß klein",
    "dish": "frisch",
    "drink": "kalt heiß",
    "clothes": "neu alt rot blau schwarz weiß teuer billig grün schmutzig schön",
    "vehicle": "neu alt rot blau schwarz grün teuer schnell",
    "thing": "neu alt schön klein groß rot",
    "opening": "groß klein alt",
    "furniture": "neu alt groß klein",
    "room": "groß klein schön alt neu ruhig",
    "public": "groß klein schön alt neu",
    "Milch": "kalt frisch heiß",
    "Wasser": "kalt frisch",
    "Suppe": "heiß",
    "Reis": "heiß",
    "Orange": "süß frisch groß klein",
    "Apfel": "rot grün süß frisch groß klein",
    "Tomate": "rot frisch groß klein",
    "Wald": "groß klein schön alt ruhig",
    "Stadt": "groß klein schön alt",
    "Lampe": "neu alt rot grün teuer",
    "Tasche": "neu schwarz rot blau teuer billig",
    "Geschenk": "schön klein groß teuer",
    "Blume": "schön rot blau weiß klein",
}
PREDICATES = {
    "adult": "müde krank glücklich traurig hungrig freundlich",
    "youth": "müde krank glücklich traurig hungrig",
    "family": "müde krank glücklich traurig hungrig groß",
    "elder": "müde krank glücklich traurig hungrig alt",
    "animal": "müde krank hungrig klein groß alt schnell",
    "text": "interessant lang kurz langweilig",
    "food": "frisch groß klein süß teuer",
    "dish": "frisch teuer billig",
    "drink": "kalt heiß teuer",
    "clothes": "neu teuer billig schmutzig schön",
    "vehicle": "neu teuer schnell schmutzig billig alt",
    "thing": "neu teuer schön billig klein",
    "opening": "schmutzig groß klein",
    "furniture": "neu teuer schmutzig groß",
    "room": "ruhig schön groß klein schmutzig kalt",
    "public": "groß schön ruhig alt klein",
    "Suppe": "heiß kalt",
    "Reis": "heiß kalt",
    "Ei": "frisch groß klein teuer",
    "Kartoffel": "frisch groß klein teuer",
    "Tomate": "frisch groß klein teuer",
}

# German (auf|machen is separable, warten+auf takes a preposition), the stem of du and er
# or all four forms, the participle (* with sein; four forms are a preterite used instead of the
# perfect), English (pick|up has a particle, wait+for a preposition), its past.
_VERBS = """
    sein         bin/bist/ist/sind     war/warst/war/waren         be         was
    haben        habe/hast/hat/haben   hatte/hattest/hatte/hatten  have       had
    wissen       weiß/weißt/weiß/wissen gewusst    know       knew
    lesen        lies      gelesen     read       read
    schreiben    -         geschrieben write      wrote
    kaufen       -         -           buy        bought
    verkaufen    -         verkauft    sell       sold
    essen        iss       gegessen    eat        ate
    fressen      friss     gefressen   eat        ate
    trinken      -         getrunken   drink      drank
    kochen       -         -           cook       -
    backen       -         gebacken    bake       -
    suchen       -         -           look+for   -
    finden       -         gefunden    find       found
    verlieren    -         verloren    lose       lost
    vergessen    vergiss   vergessen   forget     forgot
    sehen        sieh      gesehen     see        saw
    kennen       -         gekannt     know       knew
    lieben       -         -           love       -
    brauchen     -         -           need       -
    besuchen     -         besucht     visit      -
    waschen      wäsch     gewaschen   wash       -
    putzen       -         -           clean      -
    reparieren   -         repariert   repair     -
    füttern      -         -           feed       fed
    fragen       -         -           ask        -
    malen        -         -           paint      -
    auf|machen   -         -           open       -
    zu|machen    -         -           close      -
    auf|räumen   -         -           tidy|up    -
    an|ziehen    -         gezogen     put|on     put
    an|rufen     -         gerufen     call       -
    ab|holen     -         -           pick|up    -
    ein|laden    läd       geladen     invite     -
    mit|bringen  -         gebracht    bring      brought
    ein|kaufen   -         -           go|shopping went
    fern|sehen   sieh      gesehen     watch|television -
    auf|stehen   -         *gestanden  get|up     got
    an|kommen    -         *gekommen   arrive     -
    frühstücken  -         -           have|breakfast had
    schlafen     schläf    geschlafen  sleep      slept
    arbeiten     -         -           work       -
    spielen      -         -           play       -
    lachen       -         -           laugh      -
    weinen       -         -           cry        -
    singen       -         gesungen    sing       sang
    tanzen       -         -           dance      -
    sitzen       -         gesessen    sit        sat
    wohnen       -         -           live       -
    warten+auf   -         -           wait+for   -
    sprechen+mit sprich    gesprochen  talk+to    -
    spielen+mit  -         -           play+with  -
    gehen        -         *gegangen   walk       -
    laufen       läuf      *gelaufen   run        ran
    fahren       fähr      *gefahren   go         went
    kommen       -         *gekommen   come       came
    bleiben      -         *geblieben  stay       -
    helfen       hilf      geholfen    help       -
    danken       -         -           thank      -
    antworten    -         -           answer     -
    folgen       -         *gefolgt    follow     -
    gehören      -         gehört      belong+to  -
    geben        gib       gegeben     give       gave
    zeigen       -         -           show       -
    schicken     -         -           send       sent
    bringen      -         gebracht    bring      brought
    legen        -         -           put        put
    stellen      -         -           put        put
    liegen       -         gelegen     be         was
    stehen       -         gestanden   be         was
    regnen       -         -           rain       -
    schneien     -         -           snow       -
    glauben      -         -           think      thought
    hoffen       -         -           hope       -
    sagen        -         -           say        said
"""

# Modal: its four present forms, the stem of its preterite, then English: an auxiliary, a verb
# with "to", or a form of "be"; and the same in the past.
_MODALS = """
    können  kann/kannst/kann/können         konnt  can        could
    müssen  muss/musst/muss/müssen          musst  have+to    have+to
    wollen  will/willst/will/wollen         wollt  want+to    want+to
    dürfen  darf/darfst/darf/dürfen         durft  be+allowed+to be+allowed+to
    sollen  soll/sollst/soll/sollen         -      should     -
    möchten möchte/möchtest/möchte/möchten  -      would+like+to -
"""

# Verb, then the classes of subject, dative object, object, place, and marks: h what is a habit,
# i a habit only with an indefinite object (not "he eats the apple every day"), s a state (no
# progressive, no time), p only in the past, m a small matter (nobody says he eats in three
# weeks), n objects may be counted. A row listed thrice is drawn thrice as often. A place with !
# is required, with > a direction.
_FRAMES = """
    lesen        human    -      text        quiet      in
    schreiben    human    -      writing     quiet      in
    kaufen       grown    -      goods       town       n
    kaufen       human    -      groceries   shop       in
    verkaufen    grown    -      wares       -          n
    essen        human    -      meal        table      inm
    fressen      animal   -      fodder      nature     m
    trinken      human    -      drink       table      im
    trinken      animal   -      Wasser      nature     im
    kochen       grown    -      cooking     Küche      inm
    backen       human    -      baking      Küche      i
    suchen       human    -      losable     indoors    m
    suchen       human    -      pet         outdoors   m
    finden       human    -      losable     anywhere   p
    verlieren    human    -      losable     anywhere   p
    vergessen    human    -      losable     visited    p
    sehen        human    -      human       visited    p
    sehen        human    -      animal      outdoors   pn
    kennen       human    -      human       -          s
    lieben       human    -      relative    -          s
    lieben       human    -      animal      -          s
    brauchen     human    -      useful      -          s
    haben        grown    -      possession  -          sn
    besuchen     human    -      human       -          h
    besuchen     human    -      sight       -          h
    waschen      human    -      washable    -          h
    putzen       human    -      cleanable   -          h
    reparieren   grown    -      repairable  -          -
    füttern      human    -      animal      outdoors   h
    fragen       human    -      human       -          hm
    malen        human    -      motif       quiet      i
    auf|machen   human    -      openable    -          hm
    zu|machen    human    -      closable    -          hm
    auf|räumen   human    -      tidyable    -          h
    an|ziehen    human    -      clothes     -          m
    an|rufen     human    -      human       -          h
    ab|holen     human    -      human       visited    h
    ein|laden    human    -      human       -          h
    mit|bringen  human    -      gift        -          in
    ein|kaufen   grown    -      -           shopping   h
    fern|sehen   human    -      -           indoors    hm
    auf|stehen   human    -      -           -          hm
    an|kommen    human    -      -           !arrival   hm
    frühstücken  human    -      -           table      hm
    schlafen     human    -      -           bedroom    hm
    schlafen     animal   -      -           nature     hm
    arbeiten     grown    -      -           workplace  h
    spielen      child    -      -           outdoors   hm
    lachen       human    -      -           visited    hm
    weinen       child    -      -           indoors    hm
    singen       human    -      -           outdoors   hm
    tanzen       human    -      -           outdoors   h
    sitzen       human    -      -           !quiet     hm
    sitzen       smaller  -      -           !furniture hm
    wohnen       human    -      -           !home      s
    warten+auf   human    -      human       visited    hm
    sprechen+mit human    -      human       visited    h
    spielen+mit  child    -      toy         outdoors   hm
    gehen        human    -      -           !>walk     hm
    laufen       human    -      -           !>run      hm
    laufen       runner   -      -           !>outdoors hm
    fahren       human    -      -           !>journey  h
    fahren       human    -      -           !>journey  h
    fahren       human    -      -           !>journey  h
    kommen       human    -      -           !>hause    hm
    bleiben      human    -      -           !stay      h
    helfen       human    human  -           indoors    h
    danken       human    human  -           -          -
    antworten    human    human  -           -          hm
    folgen       animal   human  -           outdoors   m
    gehören      owned    human  -           -          s
    geben        human    human  gift        -          n
    zeigen       human    human  shown       -          -
    schicken     human    human  mail        -          in
    bringen      human    human  gift        -          in
    legen        human    -      flat        !>furniture m
    stellen      human    -      upright     !>furniture m
    liegen       flat     -      -           !furniture s
    liegen       lying    -      -           !furniture s
    stehen       upright  -      -           !furniture s
    stehen       vehicle  -      -           !parking   s
"""

# Classes made of nouns and other classes. A place may also be a name of PLACES below.
_UNIONS = {
    "person": "adult youth",
    "relative": "family elder",
    "human": "adult youth family elder",
    "child": "youth family",
    "grown": "adult family elder",
    "writing": "Brief Geschichte Buch",
    "groceries": "food dish drink",
    "goods": "clothes vehicle thing text furniture",
    "wares": "vehicle Haus Bild Lampe Pferd Tisch Hemd",
    "meal": "food dish",
    "lunch": "Suppe Reis Käse Kuchen",
    "fodder": "Brot Kuchen Apfel Kartoffel",
    "cooking": "Suppe Reis Kartoffel Ei",
    "baking": "Brot Kuchen",
    "losable": "Schlüssel Tasche Buch Ball Hut Jacke Brief",
    "pet": "Hund Katze Ball",
    "useful": "Schlüssel Auto Fahrrad Jacke Lampe Tasche Mantel Tisch Stuhl Wasser Zeit",
    "possession": "Auto Fahrrad Hund Katze Pferd Haus Bruder Schwester",
    "sight": "Museum Bibliothek Stadt",
    "washable": "clothes Auto Hund Pferd",
    "cleanable": "Fenster Küche Fahrrad Zimmer Büro Tisch Tür",
    "repairable": "vehicle Lampe Tür Fenster Stuhl Tisch Bett",
    "motif": "Bild Blume Vogel Pferd Haus",
    "openable": "Fenster Tür Tasche Brief Geschenk Buch",
    "closable": "Fenster Tür Tasche Buch",
    "tidyable": "Zimmer Küche Büro Haus",
    "gift": "Buch Blume Bild Geschenk Kuchen Apfel Orange Kaffee Tee Ball",
    "shown": "Buch Bild Brief Haus Garten Stadt Auto Zimmer Jacke",
    "mail": "Brief Bild Buch Geschenk",
    "flat": "Buch Zeitung Brief Schlüssel Hemd Jacke",
    "upright": "Tasche Lampe Stuhl",
    "owned": "vehicle clothes Buch Hund Katze Haus Garten Schlüssel Tasche",
    "toy": "Hund Katze Ball",
    "smaller": "Hund Katze Vogel",
    "runner": "Hund Katze Pferd",
    "lying": "Hund Katze",
    "quiet": "Garten Küche Zimmer Büro Park Bibliothek Schule Zug",
    "town": "Stadt",
    "shop": "Supermarkt Stadt",
    "table": "Küche Garten Restaurant Büro Park Zug",
    "nature": "Garten Park Wald",
    "indoors": "Küche Zimmer Büro Haus",
    "outdoors": "Garten Park Wald",
    "anywhere": "Garten Park Bibliothek Schule Bahnhof Supermarkt Museum Zug",
    "visited": "Bahnhof Park Museum Restaurant Bibliothek Supermarkt Schule Stadt",
    "shopping": "Supermarkt Stadt",
    "arrival": "Bahnhof Museum Krankenhaus Schule Büro",
    "bedroom": "Zimmer Zug Garten",
    "workplace": "Büro Krankenhaus Schule Museum Restaurant Supermarkt Garten Bibliothek",
    "home": "Stadt Haus Berlin Hamburg Wien München",
    "walk": "Garten Küche Zimmer Büro Schule Park Museum Restaurant Bibliothek Supermarkt "
    "Bahnhof Wald Stadt Haus",
    "run": "Garten Küche Schule Park Bahnhof Wald Haus",
    "journey": "Stadt Büro Schule Supermarkt Krankenhaus Berlin Hamburg Wien München",
    "hause": "Hause",
    "stay": "Hause Zimmer Garten Büro Berlin Wien Stadt",
    "parking": "Haus Garten Bahnhof Schule",
}

# Noun: German and English preposition of the location, then of the direction.
PREPOSITIONS = {
    "Garten": ("in", "in", "in", "into"),
    "Küche": ("in", "in", "in", "into"),
    "Zimmer": ("in", "in", "in", "into"),
    "Haus": ("in", "in", "in", "into"),
    "Büro": ("in", "at", "in", "to"),
    "Schule": ("in", "at", "in", "to"),
    "Park": ("in", "in", "in", "to"),
    "Museum": ("in", "at", "in", "to"),
    "Restaurant": ("in", "at", "in", "to"),
    "Bibliothek": ("in", "in", "in", "to"),
    "Supermarkt": ("in", "at", "in", "to"),
    "Bahnhof": ("an", "at", "zu", "to"),
    "Krankenhaus": ("in", "at", "in", "to"),
    "Wald": ("in", "in", "in", "into"),
    "Stadt": ("in", "in", "in", "to"),
}
# Places that stand without an article: location and direction.
PLACES = {
    "Berlin": (("in Berlin", "in Berlin"), ("nach Berlin", "to Berlin")),
    "Hamburg": (("in Hamburg", "in Hamburg"), ("nach Hamburg", "to Hamburg")),
    "Wien": (("in Wien", "in Vienna"), ("nach Wien", "to Vienna")),
    "München": (("in München", "in Munich"), ("nach München", "to Munich")),
    "Hause": (("zu Hause", "at home"), ("nach Hause", "home")),
    "Zug": (("im Zug", "on the train"), ("in den Zug", "onto the train")),
}
RELATIONS = (
    ("auf", "on"),
    ("unter", "under"),
    ("neben", "next to"),
    ("hinter", "behind"),
    ("vor", "in front of"),
)
TRANSPORT = (
    ("mit dem Zug", "by train"),
    ("mit dem Bus", "by bus"),
    ("mit dem Auto", "by car"),
    ("mit dem Fahrrad", "by bicycle"),
)

# Nominative, accusative, dative; English subject and object; form; possessives.
# sie+ is the plural. The accusative of both sie is left out: it could mean her or them.
PRONOUNS: dict[str, tuple[str, str, str, str, str, int]] = {
    "ich": ("ich", "mich", "mir", "I", "me", ICH),
    "du": ("du", "dich", "dir", "you", "you", DU),
    "er": ("er", "ihn", "ihm", "he", "him", ER),
    "sie": ("sie", "", "ihr", "she", "her", ER),
    "es": ("es", "es", "ihm", "it", "it", ER),
    "wir": ("wir", "uns", "uns", "we", "us", WIR),
    "sie+": ("sie", "", "ihnen", "they", "them", WIR),
    "wer": ("wer", "wen", "wem", "who", "who", ER),
    "was": ("was", "was", "", "what", "what", ER),
}
POSSESSIVES = {
    "ich": ("mein", "my"),
    "du": ("dein", "your"),
    "er": ("sein", "his"),
    "sie": ("ihr", "her"),
    "wir": ("unser", "our"),
    "sie+": ("ihr", "their"),
}
MEN = ("Paul", "Peter", "Tim", "David")
WOMEN = ("Anna", "Lena", "Maria", "Julia")
NUMBERS = {
    "zwei": "two",
    "drei": "three",
    "vier": "four",
    "fünf": "five",
    "sechs": "six",
    "sieben": "seven",
    "acht": "eight",
    "neun": "nine",
    "zehn": "ten",
    "elf": "eleven",
    "zwölf": "twelve",
    "zwanzig": "twenty",
}
WEEKDAYS = {
    "Montag": "Monday",
    "Dienstag": "Tuesday",
    "Mittwoch": "Wednesday",
    "Donnerstag": "Thursday",
    "Freitag": "Friday",
    "Samstag": "Saturday",
    "Sonntag": "Sunday",
}


def _plural(word: str) -> str:
    """Regular English plural, and equally the third person of a verb: city, dish, tomato."""
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|sh|ch|o)$", word) else "s")


def _doubled(word: str) -> str:
    """The stem before -ing and -ed: put -> putt, write -> writ, visit -> visit."""
    if re.search(r"[^aeiou]e$", word) and word != "be":
        return word[:-1]
    short = re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", word) or word == "forget"
    return word + word[-1] if short else word


@dataclass(frozen=True)
class Noun:
    german: str
    gender: str  # m f n
    plural: str  # "" where it has none
    english: str
    english_plural: str
    kind: str  # the class of _NOUNS that lists it
    weak: bool  # takes -n outside the nominative

    def decline(self, case: int, plural: bool) -> str:
        if plural:
            return self.plural + ("n" if case == DATIVE and self.plural[-1] not in "ns" else "")
        return self.plural if self.weak and case != NOMINATIVE else self.german


@dataclass(frozen=True)
class Adjective:
    german: str
    stem: str  # before an ending: teuer, der teure Mantel
    english: str


@dataclass(frozen=True)
class Verb:
    infinitive: str  # with its prefix: aufmachen
    prefix: str  # the separable one, or ""
    preposition: str  # warten auf
    present: tuple[str, ...]  # four forms, without the prefix
    participle: str
    preterite: tuple[str, ...]  # four forms where they replace the perfect, else empty
    auxiliary: str  # haben or sein
    english: str
    particle: str  # pick up
    english_preposition: str  # wait for
    past: str

    @property
    def third(self) -> str:
        return "has" if self.english == "have" else _plural(self.english)

    @property
    def ing(self) -> str:
        return _doubled(self.english) + "ing"


@dataclass(frozen=True)
class Modal:
    present: tuple[str, ...]
    preterite: tuple[str, ...]  # empty where the corpus does not use it
    english: str  # "can", "have to", "be allowed to"
    english_past: str


@dataclass(frozen=True)
class Frame:
    """A verb and the classes of what it goes with."""

    verb: Verb
    subject: str
    dative: str
    direct: str
    place: str
    place_required: bool
    direction: bool
    habit: bool
    habit_if_indefinite: bool
    state: bool
    past_only: bool
    small: bool
    counted: bool


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


def _present(infinitive: str, change: str) -> tuple[str, ...]:
    """ich, du, er, wir: lese, liest, liest, lesen; arbeite, arbeitest, arbeitet, arbeiten."""
    if "/" in change:
        return tuple(change.split("/"))
    stem = infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]
    other = stem if change == "-" else change
    joint = "e" if change == "-" and re.search(r"([td]|[^aeiouäöülrhnm][nm])$", stem) else ""
    du = other + joint + ("t" if re.search(r"[sßz]$", other) else "st")
    er = other + joint + "t"
    return (stem + "e", du, er, infinitive)


def _verb(row: list[str]) -> tuple[str, Verb]:
    name, change, participle, english, past = row
    bare, _, preposition = name.partition("+")
    prefix, _, infinitive = bare.rpartition("|")
    present = _present(infinitive, change)
    if participle == "-":
        participle = "ge" + _present(infinitive, "-")[2]
    preterite = tuple(participle.split("/")) if "/" in participle else ()
    phrase, _, english_preposition = english.partition("+")
    base, _, particle = phrase.partition("|")
    regular = re.sub(r"([^aeiou])y$", r"\1i", _doubled(base)) + "ed"
    return name, Verb(
        infinitive=prefix + infinitive,
        prefix=prefix,
        preposition=preposition,
        present=present,
        participle=prefix + participle.lstrip("*"),
        preterite=preterite,
        auxiliary="sein" if participle.startswith("*") else "haben",
        english=base,
        particle=particle,
        english_preposition=english_preposition,
        past=regular if past == "-" else past,
    )


def _modal(row: list[str]) -> tuple[str, Modal]:
    name, present, stem, english, past = row
    preterite = () if stem == "-" else tuple(stem + ending for ending in ("e", "est", "e", "en"))
    return name, Modal(
        tuple(present.split("/")), preterite, english.replace("+", " "), past.replace("+", " ")
    )


def _noun(kind: str, row: list[str]) -> Noun:
    gender, german, plural, english, english_plural = row
    return Noun(
        german=german,
        gender=gender[0],
        plural="" if plural == "-" else plural,
        english=english,
        english_plural=_plural(english) if english_plural == "-" else english_plural,
        kind=kind,
        weak=gender.endswith("*"),
    )


def _frame(row: list[str]) -> Frame:
    verb, subject, dative, direct, place, marks = (cell.strip("-") for cell in row)
    return Frame(
        verb=VERBS[verb],
        subject=subject,
        dative=dative,
        direct=direct,
        place=place.lstrip("!>"),
        place_required="!" in place,
        direction=">" in place,
        habit="h" in marks or "i" in marks,
        habit_if_indefinite="i" in marks,
        state="s" in marks,
        past_only="p" in marks,
        small="m" in marks,
        counted="n" in marks,
    )


def _members(name: str) -> tuple[str, ...]:
    """The words of a class, in the order of the tables."""
    if name in _UNIONS:
        return tuple(word for part in _UNIONS[name].split() for word in _members(part))
    if name in _NOUNS:
        return tuple(row[1] for row in _rows(_NOUNS[name]))
    return (name,)


NOUNS = {row[1]: _noun(kind, row) for kind, table in _NOUNS.items() for row in _rows(table)}
VERBS = dict(_verb(row) for row in _rows(_VERBS))
MODALS = dict(_modal(row) for row in _rows(_MODALS))
FRAMES = tuple(_frame(row) for row in _rows(_FRAMES))
CLASSES = {name: _members(name) for name in (*_UNIONS, *_NOUNS, *NOUNS)}
_TRIPLES = re.findall(r"(\S+) (\S+) (\S+)", _ADJECTIVES)
ADJECTIVES = {
    german: Adjective(german, german if stem == "-" else stem, english)
    for german, stem, english in _TRIPLES
}


def adjective(german: str, noun: Noun) -> Adjective:
    """The adjective as said of this noun: groß is tall of a man, big of a house."""
    english = _SPECIAL_ADJECTIVES.get((german, noun.kind))
    found = ADJECTIVES[german]
    return Adjective(german, found.stem, english) if english else found
