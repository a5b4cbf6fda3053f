"""Questions of one topic that no prompt set has, for ``bench learn``: queries in SQL.

The first ones ask about tables that none of the others ask about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

_MEASURED = {
    "animals": ("animal_id", "species", "age", "weight", "enclosure"),
    "servers": ("server_id", "host", "memory", "load", "region"),
    "apartments": ("apartment_id", "street", "rent", "rooms", "floor"),
    "donations": ("donation_id", "donor", "amount", "campaign", "given_at"),
    "wines": ("wine_id", "name", "region", "vintage", "points"),
}

_LEARNED = {
    "orders": ("order_id", "customer_id", "amount", "order_date", "status"),
    "employees": ("employee_id", "name", "department", "salary", "hire_date"),
    "products": ("product_id", "name", "price", "category", "stock"),
    "students": ("student_id", "name", "grade", "school", "birth_date"),
    "flights": ("flight_id", "origin", "destination", "departure", "price"),
    "books": ("book_id", "title", "author", "year", "pages"),
    "patients": ("patient_id", "name", "age", "diagnosis", "admitted"),
    "hotels": ("hotel_id", "city", "stars", "rooms", "price"),
    "invoices": ("invoice_id", "vendor", "total", "due_date", "paid"),
    "songs": ("song_id", "title", "artist", "album", "seconds"),
    "movies": ("movie_id", "title", "director", "year", "rating"),
    "cars": ("car_id", "maker", "model", "year", "price"),
    "cities": ("city_id", "name", "country", "population", "area"),
    "tickets": ("ticket_id", "event", "seat", "price", "sold"),
    "sensors": ("sensor_id", "place", "kind", "value", "measured_at"),
    "payments": ("payment_id", "account_id", "amount", "method", "paid_at"),
    "teams": ("team_id", "name", "league", "wins", "losses"),
    "recipes": ("recipe_id", "title", "cuisine", "minutes", "servings"),
    "courses": ("course_id", "title", "teacher", "credits", "semester"),
    "shipments": ("shipment_id", "carrier", "weight", "sent", "arrived"),
}

_QUESTIONS = (
    "Write a SQL query that lists {a} and {b} of the table {table}, where {n} is above {least}, "
    "sorted by {b}.",
    "Write a SQL query that counts the rows of the table {table} for each {a}.",
    "Write a SQL query for the average {n} for each {a} in the table {table}.",
    "Write a SQL query that finds the ten rows of the table {table} with the highest {n}. Show {a} "
    "and {n}.",
    "The table {table} has the columns {columns}. Write a SQL query for the rows whose {a} is "
    "'{value}'.",
)


def sql_questions(measured: int, further: int) -> list[str]:
    """So many questions to measure, and then as many to learn from as are wanted; fewer where there
    are no more: 25 and 100."""
    random = Random(70)
    return [*_asked(_MEASURED, measured, random), *_asked(_LEARNED, further, random)]


def _asked(tables: Mapping[str, Sequence[str]], count: int, random: Random) -> Iterator[str]:
    pairs = [(table, question) for table in tables for question in _QUESTIONS]
    random.shuffle(pairs)
    for table, question in pairs[:count]:
        _, first, second, third, _ = columns = tables[table]
        yield question.format(
            table=table,
            a=first,
            b=second,
            n=random.choice((second, third)),
            least=random.choice((10, 50, 100, 1000)),
            columns=", ".join(columns),
            value=random.choice(("north", "Smith", "A", "open", "Berlin")),
        )
