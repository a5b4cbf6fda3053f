import instructor
import openai
from common import KEY, MESSAGES, MODE, MODEL, URL, say
from pydantic import BaseModel


class Place(BaseModel):
    city: str


client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    places = instructor.from_openai(client, mode=mode).chat.completions
    ask = {"model": MODEL, "messages": MESSAGES, "max_retries": 0}
    if MODE == "stream":
        pieces = list(places.create_partial(**ask, response_model=Place))
        assert len(pieces) > 1
        say(pieces[-1].city)
    else:
        say(places.create(**ask, response_model=Place).city)
