"""The input `caption`: a text that is written on images."""

from dataclasses import dataclass

from PIL import ImageDraw

from lantern_rt import register_input
from lantern_rt.subjects.base import Option, Part, Words


@dataclass
class Caption(Part):
    option = Option("caption", str, "TEXT", "Text to write on images.")
    words = (Words("caption", "caption", "caption", option, json_type=str),)  # in Python, HTTP and recipes
    text: str

    def finish_image(self, image):
        ImageDraw.Draw(image).text((2, 2), self.text)
        return image

    @property
    def record(self):
        return {"caption": self.text}


register_input(Caption)
