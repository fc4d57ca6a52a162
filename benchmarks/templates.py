"""Prompts with parameters in the middle of modules, for the choice of what stands in a slot during encoding.

Each template has default texts of the kind that is filled in, arguments for three prompts, and two questions: one
that the argument answers, and one that the text around it answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_pc import schemas
from edge_pc.pml import Schema, Selection, build_prompt, load_schema, parse_schema, select


@dataclass(frozen=True, slots=True)
class Template:
    """A schema with one module, `form`, and what is asked about it.

    Attributes:
        name: of the schema.
        text: the module's content, in PML.
        fillers: arguments of each prompt.
        about_argument: a question; its answer is the argument of the parameter named with it.
        about_text: a question, and its answer from the text.
    """

    name: str
    text: str
    fillers: tuple[dict[str, str], ...]
    about_argument: tuple[str, str]
    about_text: tuple[str, str]

    def schema(self) -> Schema:
        text = " ".join(self.text.split())
        return parse_schema(
            f'<schema name="{self.name}"><system>Read the text, then answer the question with a few words.\n'
            f'<module name="form">{text}</module></system></schema>'
        )

    def prompts(self, schema: Schema) -> Iterator[tuple[str, Selection, str]]:
        """(key, checked prompt, right answer) of each filler and question."""
        question, parameter = self.about_argument
        for number, filler in enumerate(self.fillers, start=1):
            arguments = {f"form.{name}": value for name, value in filler.items()}
            for kind, text, answer in (("argument", question, filler[parameter]), ("text", *self.about_text)):
                prompt = build_prompt(schema, ["form"], arguments, text)
                yield f"{self.name}-{number}-{kind}", select(prompt, schema), answer


def parameter_prompts() -> Iterator[tuple[str, Schema, Selection, str]]:
    """(key, schema, checked prompt, right answer) of every template, and of the ready schema `travel` (no answer)."""
    for template in TEMPLATES:
        schema = template.schema()
        for key, selection, answer in template.prompts(schema):
            yield key, schema, selection, answer
    travel = load_schema(schemas.path("travel"))
    for number, (imports, arguments) in enumerate(_TRAVEL, start=1):
        prompt = build_prompt(travel, imports, arguments, "Which booking should we make first, and why?")
        yield f"travel-{number}", travel, select(prompt, travel), ""


_TRAVEL: tuple[tuple[list[str], dict[str, str]], ...] = (
    (["trip/city/lisbon", "trip/budget"], {"trip.days": "five days", "trip/budget.amount": "900 euros"}),
    (["trip/outdoors/hebrides"], {"trip.days": "a long weekend", "trip.month": "late May", "trip.party": "four aunts"}),
    (
        ["trip/city/kyoto", "trip/budget", "trip/children"],
        {"trip.days": "three weeks", "trip/budget.amount": "4000 dollars", "trip/children.ages": "six and nine"},
    ),
)

TEMPLATES = (
    Template(
        "trip",
        """We are planning a trip. We will be away for <param name="days" length="8">three days</param>, starting in
        <param name="month" length="8">the spring</param>. Two of us walk well and eat everything; the third is
        <param name="third" length="12">a friend with a bad knee</param>, so please keep the stairs to a minimum. We
        go by night train, because none of us likes to fly, and we would like to sleep near the harbour. Dinner
        should not cost more than <param name="price" length="8">thirty euros</param> for each of us.""",
        (
            {"days": "nine days", "month": "late November", "third": "my grandmother Ida", "price": "12 euros"},
            {"days": "two weeks", "month": "July", "third": "a boy of four", "price": "forty euros"},
            {"days": "a weekend", "month": "early March", "third": "an old sailor", "price": "55 euros"},
        ),
        ("For how long will they be away?", "days"),
        ("How do they travel?", "by night train"),
    ),
    Template(
        "order",
        """Order form. The customer, <param name="customer" length="12">the buyer named above</param>, orders
        <param name="count" length="6">ten</param> boxes of <param name="goods" length="10">printing paper</param>.
        They are to be delivered on a <param name="day" length="4">Monday</param> before noon, at the back door,
        where the caretaker signs for them. Payment is due within thirty days of delivery. Damaged boxes are
        returned with the next lorry, and the invoice is corrected at the end of the month.""",
        (
            {"customer": "Hotel Seeblick", "count": "42", "goods": "candles", "day": "Friday"},
            {"customer": "Mrs. Okafor", "count": "three", "goods": "drawing chalk", "day": "Tuesday"},
            {"customer": "Riverside School", "count": "200", "goods": "pencils", "day": "Saturday"},
        ),
        ("Which goods are ordered?", "goods"),
        ("Who signs for the boxes?", "the caretaker"),
    ),
    Template(
        "report",
        """Report of the night watch. At <param name="time" length="8">ten o'clock</param> the alarm in
        <param name="place" length="12">the main building</param> went off. The guard on duty went there with a
        torch and found <param name="found" length="24">nothing unusual</param>. He reset the alarm and wrote down
        the number of the sensor, which is 17. The rest of the night was quiet. The gate was locked at midnight and
        the dog was fed. In the morning the day shift was told about it, and the sensor was ordered to be replaced.""",
        (
            {"time": "half past two", "place": "the boat house", "found": "a window broken by a fallen branch"},
            {"time": "4:15", "place": "laboratory 3", "found": "an open fridge"},
            {"time": "a quarter to one", "place": "the library", "found": "a student asleep behind the shelves"},
        ),
        ("What did the guard find?", "found"),
        ("What is the number of the sensor?", "17"),
    ),
    Template(
        "recipe",
        """This soup is for <param name="people" length="6">four</param> people. Wash a kilo of
        <param name="vegetable" length="10">carrots</param>, peel them and cut them into small pieces. Fry an onion
        in butter until it is soft, add the pieces and stir for five minutes. Pour in a litre of stock, add
        <param name="spice" length="10">a little salt</param>, and let it boil gently for
        <param name="minutes" length="8">twenty minutes</param>. Take it from the fire, mash it, and put it through
        a sieve if you like it fine. It is served with toasted rye bread.""",
        (
            {"people": "six", "vegetable": "parsnips", "spice": "nutmeg and cumin", "minutes": "35 minutes"},
            {"people": "two", "vegetable": "beetroot", "spice": "caraway", "minutes": "an hour"},
            {"people": "12", "vegetable": "pumpkin", "spice": "ginger and chili", "minutes": "ten minutes"},
        ),
        ("Which vegetable is the soup made of?", "vegetable"),
        ("What is the soup served with?", "toasted rye bread"),
    ),
    Template(
        "patient",
        """The patient is <param name="age" length="8">an adult</param> and works as <param name="job" length="8">a
        clerk</param>. Main complaint: <param name="complaint" length="16">pain</param> since
        <param name="since" length="8">some days</param>. There is no fever. Blood pressure was measured twice and
        is normal. The patient takes no medicine and is allergic to penicillin. Two years ago a broken wrist was
        treated in this practice and healed well. The family is healthy. Advice: rest, plenty of water, and another
        visit in a week if it has not become better by then.""",
        (
            {"age": "63 years old", "job": "a gardener", "complaint": "a stiff neck", "since": "Sunday"},
            {"age": "nineteen", "job": "a dancer", "complaint": "a swollen left ankle", "since": "last night"},
            {"age": "in her forties", "job": "a pilot", "complaint": "ringing in both ears", "since": "two months"},
        ),
        ("What is the patient's main complaint?", "complaint"),
        ("What is the patient allergic to?", "penicillin"),
    ),
    Template(
        "house",
        """For rent: a house with <param name="rooms" length="6">four</param> rooms in
        <param name="town" length="12">a quiet village</param>, built in <param name="year" length="6">1950</param>.
        The kitchen faces east and has a gas cooker. Behind the house lies a garden with two apple trees and a shed
        for bicycles. The owner, <param name="owner" length="12">who lives next door</param>, keeps hens and does
        not mind children. The rent has to be paid on the first of each month. Dogs are not allowed. The bus to the
        station takes nine minutes.""",
        (
            {"rooms": "six", "town": "Marlow Green", "year": "1887", "owner": "Mr. Abernathy"},
            {"rooms": "two", "town": "the old port of Lorne", "year": "2009", "owner": "a retired judge"},
            {"rooms": "seven", "town": "Kirkwall", "year": "1924", "owner": "Sister Agnes"},
        ),
        ("In which year was the house built?", "year"),
        ("Which animals are not allowed?", "dogs"),
    ),
    Template(
        "match",
        """The final was played in <param name="city" length="8">the capital</param> on a wet evening in front of a
        full stadium. For an hour nobody scored. Then <param name="scorer" length="12">the captain</param> took the
        ball in his own half, ran past three defenders and shot it into the corner. The other side pressed hard, hit
        the post twice and had a goal refused, but the result was <param name="score" length="8">one to
        nothing</param>. The referee showed five yellow cards. Afterwards the trainer said that
        <param name="said" length="24">he was proud of them</param>, and the team bus needed two hours for the way
        to the hotel.""",
        (
            {"city": "Tbilisi", "scorer": "young Pereira", "score": "two to one", "said": "the keeper had saved them"},
            {"city": "Oslo", "scorer": "number 9, Lindqvist", "score": "1:0", "said": "it was only luck"},
            {"city": "Lagos", "scorer": "Adeyemi", "score": "three to two", "said": "he would retire in June"},
        ),
        ("Who scored after an hour?", "scorer"),
        ("How many yellow cards did the referee show?", "five"),
    ),
)
