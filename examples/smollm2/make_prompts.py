"""Writes the demo's prompts: classes and tables in three languages, from a list of things and their properties.

    python examples/smollm2/make_prompts.py

Six forms of request, filled from 80 things. Every tenth thing is held out: prompts-eval.jsonl asks only about things
that no training prompt names. No randomness: the files are the same on every machine. The forms are those that this
small model answers in a regular way; asked for Java, it gets lost in imports.
"""

from __future__ import annotations

import json
from pathlib import Path

FORMS = (
    "Write a Python class named {thing} with the attributes {0} and {1}.",
    "Write a Python class named {thing} with the attributes {0}, {1} and {2}.",
    "Write a C# class named {thing} with the properties {0} and {1}.",
    "Write a C# class named {thing} with the properties {0}, {1} and {2}.",
    "Write an SQL statement that creates the table {thing} with the columns {0} and {1}.",
    "Write an SQL statement that creates the table {thing} with the columns {0}, {1} and {2}.",
)
CHOICES = ((0, 1, 2), (0, 2, 3))  # which of a thing's four properties a training prompt names
HELD_OUT_EVERY = 10

THINGS = """
Car brand model year color
Student name age grade school
Movie title director year length
Planet name mass radius moons
Book title author pages price
Dog name breed age weight
Song title artist length year
Hotel name city rooms stars
River name length width country
Teacher name subject school email
Order id customer date total
Phone brand model price color
Flight number origin destination duration
Garden name width length owner
Bank name city branches founded
City name country population area
Employee name role salary office
Product name price stock category
Recipe title servings minutes author
Lake name depth area country
Invoice number customer date amount
Ticket number seat price date
Camera brand model resolution price
Museum name city visitors founded
Train number origin destination speed
Player name team position goals
Team name city coach points
Bicycle brand color size price
Mountain name height country range
Patient name age doctor room
Doctor name field hospital phone
Customer name email phone city
Course title teacher hours room
Ship name length captain speed
Painting title artist year museum
Bird name color wingspan habitat
Bottle brand volume material price
House street number rooms price
Computer brand memory disk price
Tree name height age location
Airport name code city runways
Lesson title subject minutes teacher
Shop name street owner products
Robot name height weight battery
Letter sender receiver date text
Star name mass distance color
Cat name breed age color
Restaurant name city seats rating
Game title studio year players
Lamp brand color power price
Country name capital population language
Article title author date words
Bus number route seats driver
Horse name breed age owner
Bridge name length height city
Printer brand model speed price
Island name area population country
Message sender text date status
Farm name owner area animals
Chair brand material height price
Stadium name city seats year
Contact name phone email address
Laptop brand model memory weight
Festival name city date visitors
Tower name height city floors
Plant name height color origin
Event title date place guests
Truck brand model load year
Library name city books members
Shirt brand size color price
Theater name city seats founded
Payment number amount date method
Actor name age country movies
Bakery name street owner breads
Meeting title date room host
Clock brand material size price
Village name country population river
Watch brand model price weight
Package number weight sender status
Pilot name age airline hours
"""


def prompts() -> tuple[list[str], list[str]]:
    """(training, evaluation)."""
    training, evaluation = [], []
    for index, line in enumerate(THINGS.split("\n")[1:-1]):
        thing, *properties = line.split()
        held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        for choice in CHOICES[:1] if held_out else CHOICES:
            named = [properties[i] for i in choice]
            (evaluation if held_out else training).extend(form.format(*named, thing=thing) for form in FORMS)
    assert not set(training) & set(evaluation)
    return training, evaluation


def main() -> None:
    for name, texts in zip(("train", "eval"), prompts(), strict=True):
        path = Path(__file__).with_name(f"prompts-{name}.jsonl")
        rows = [json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in texts]
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
