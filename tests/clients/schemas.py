"""Random JSON schemas, of the kinds that JSON Schema's own test suite and jsonschemabench have.

A seed is a schema. Most can be fulfilled and end soon (strings and arrays are bounded more often than not), as a text
that is cut shows nothing. Some ask for what a server may refuse.
"""

import random

NAMES = ["name", "id", "value", "items", "kind", "a", "b", "user_id", "first name", "x-y", "größe", "日本", "quo\"te", "back\\slash",
         "", "$ref", "type", "new\nline", "😀", "tab\there", "slash/tilde~", "0"]
WORDS = ["red", "green", "blue", "", "a", "yes", "no", "it's", "say \"hi\"", "C:\\dir", "two\nlines", "naïve", "日本語", "😀😁", "null", "1",
         " space ", "\u0001", "</script>", "{}", "[1, 2]"]
# Of a language that JavaScript, Python and Rust read alike; each has short matches.
PATTERNS = ["^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3,5}$", "^(foo|bar|baz)+$", "^\\d{1,3}(\\.\\d{1,3}){3}$", "^[^\"\\\\]{0,10}$", "^#[0-9a-fA-F]{6}$",
            "^\\+?[1-9]\\d{1,14}$", "^\\S{1,6}$", "^[\\w.-]{1,12}@[\\w-]{1,8}\\.[a-z]{2,3}$", "ab?c", "^x", "z$", "^$", "^(a|b)?$", "^.{2,5}$",
            "^[\\u0041-\\u005A]{1,4}$", "^\\s{1,2}$", "^\\D{1,3}$", "^\\W{1,3}$", "^(?:[0-9]{4}-(?:0[1-9]|1[0-2]))$", "^a.c$", "[0-9]{2}"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
KEYS = ["^x_[a-z]{1,3}$", "^[0-9]{1,2}$", "^[A-Z]", "id$", "^(le|ri)ft$"]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.defs = {}

    def chance(self, part):
        return self.random.random() < part

    def pick(self, values):
        return self.random.choice(values)

    def schema(self):
        schema = self.any(self.pick([1, 2, 2, 3, 3, 4]))
        if schema is True:
            schema = {}
        if self.chance(0.08):
            schema = self.recursive()
        if self.defs:
            schema[self.pick(["$defs", "$defs", "definitions"]) if not self.refers else self.refers] = self.defs
        if self.chance(0.1):
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return schema

    refers = None

    def define(self, schema):
        self.refers = self.refers or self.pick(["$defs", "definitions"])
        name = self.pick(["thing", "a b", "sla/sh", "til~de", "per%cent"]) + str(len(self.defs))
        self.defs[name] = schema
        pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        return {"$ref": f"#/{self.refers}/{pointer}"}

    def recursive(self):
        """A list, a tree, or something that holds itself."""
        self.defs, self.refers = {}, None
        leaf = self.scalar()
        kind = self.random.randrange(3)
        if kind == 0:
            return {"type": "object", "properties": {"value": leaf, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                    "required": ["value", "next"], "additionalProperties": False}
        if kind == 1:
            self.refers = "$defs"
            self.defs["node"] = {"type": "object", "properties": {"label": leaf, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                                 "required": ["label"], "additionalProperties": False}
            return {"$ref": "#/$defs/node"}
        return {"type": ["array", "integer"], "items": {"$ref": "#"}, "maxItems": 3, "minimum": 0, "maximum": 99}

    def any(self, depth):
        if depth == 0:
            return self.scalar()
        kinds = [(self.object, 9), (self.array, 5), (self.scalar, 5), (self.union, 4), (self.all, 2), (self.literal, 2), (self.untyped, 1), (self.refused, 0.4)]
        make = self.random.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        schema = make(depth)
        if isinstance(schema, dict) and depth < 4 and self.chance(0.08):
            schema = self.define(schema)
            if self.chance(0.2):
                schema = {"description": "beside", **schema}
        if isinstance(schema, dict) and self.chance(0.1):
            schema = {**schema, "title": "A title", "description": "What it is.", "default": None, "examples": [1]}
        return schema

    def scalar(self, _=0):
        make = self.pick([self.string, self.string, self.integer, self.number, self.flag, self.literal, self.several])
        return make()

    def flag(self):
        return {"type": self.pick(["boolean", "boolean", "null"])}

    def several(self):
        schema = {"type": self.random.sample(["null", "boolean", "integer", "string"], self.pick([1, 2, 3])), "maxLength": 8}
        if self.chance(0.3):
            schema["minimum"] = self.pick([-3, 0, 10])
        return schema

    def string(self):
        kind = self.random.randrange(10)
        schema = {"type": "string"}
        if kind < 4:
            least = self.pick([0, 0, 1, 2, 5])
            schema["maxLength"] = least + self.pick([0, 1, 3, 10, 30])
            if least or self.chance(0.3):
                schema["minLength"] = least
        elif kind < 6:
            schema["pattern"] = self.pick(PATTERNS)
            if self.chance(0.5):
                schema["maxLength"] = self.pick([20, 25, 30])
        elif kind < 8:
            schema["format"] = self.pick(FORMATS)
            if self.chance(0.3):
                schema["maxLength"] = self.pick([40, 60])
        elif kind < 9:
            schema["enum"] = self.random.sample(WORDS, self.pick([1, 2, 5, 12]))
        elif self.chance(0.3):
            schema["minLength"] = 1
        return schema

    def bounds(self, number):
        schema = {}
        low = number()
        high = low + abs(number())
        if self.chance(0.6):
            schema[self.pick(["minimum", "minimum", "exclusiveMinimum"])] = low
        if self.chance(0.6):
            schema[self.pick(["maximum", "maximum", "exclusiveMaximum"])] = high
        if "exclusiveMinimum" in schema or "exclusiveMaximum" in schema:
            for key in schema:
                schema[key] += 2 if key.endswith("aximum") else 0
        return schema

    def integer(self):
        schema = {"type": "integer", **self.bounds(lambda: self.pick([0, 1, 5, 17, 100, 999, 65535, 10**9, -1, -20, -1000, 2**40]))}
        if self.chance(0.2):
            schema = {"type": "integer", "minimum": self.pick([-100, 0, 7]), "maximum": 1000, "multipleOf": self.pick([1, 2, 3, 5, 10, 7])}
        return schema

    def number(self):
        schema = {"type": "number", **self.bounds(lambda: self.pick([0, 0.5, 1.25, -3.75, 10, 99.9, 1e6, -0.001, 1e-7, 123456.789, 3]))}
        if self.chance(0.15):
            schema = {"type": "number", "multipleOf": self.pick([0.5, 0.25, 0.01, 1, 2.5, 100])}
            if self.chance(0.5):
                schema.update(minimum=self.pick([-10, 0]), maximum=self.pick([10, 250]))
        return schema

    def value(self, depth=2):
        kinds = ["word", "integer", "number", "flag", "null"] + (["list", "object"] if depth else [])
        kind = self.pick(kinds)
        if kind == "list":
            return [self.value(depth - 1) for _ in range(self.pick([0, 1, 3]))]
        if kind == "object":
            return {name: self.value(depth - 1) for name in self.random.sample(NAMES, self.pick([0, 1, 2]))}
        return {"word": self.pick(WORDS), "integer": self.pick([2**53 + 1, -(2**60) - 1]) if self.chance(0.03) else self.pick([0, 1, -7, 42, 10**12]),
                "number": self.pick([0.5, -1.25, 3.0, 1e10, 1e-5, 0.1, 123.456]), "flag": self.chance(0.5), "null": None}[kind]

    def literal(self, _=0):
        if self.chance(0.4):
            return {"const": self.value()}
        return {"enum": [self.value() for _ in range(self.pick([1, 2, 3, 6]))]}

    def array(self, depth):
        schema = {"type": "array"}
        if self.chance(0.25):
            schema["prefixItems"] = [self.any(depth - 1) for _ in range(self.pick([1, 2, 3]))]
            schema["items"] = self.pick([False, False, self.scalar()])
            if self.chance(0.6):
                schema["minItems"] = len(schema["prefixItems"]) - self.pick([0, 1])
            if schema["items"] is not False:
                schema["maxItems"] = len(schema["prefixItems"]) + self.pick([0, 2])
            return schema
        schema["items"] = self.any(depth - 1)
        least = self.pick([0, 0, 1, 2])
        if least:
            schema["minItems"] = least
        if self.chance(0.85):
            schema["maxItems"] = least + self.pick([0, 1, 3])
        return schema

    def object(self, depth):
        names = self.random.sample(NAMES, self.pick([0, 1, 2, 3, 4, 6]))
        schema = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        if self.chance(0.75):
            schema["required"] = self.random.sample(names, self.random.randint(0, len(names)))
            if self.chance(0.07):
                schema["required"].append("never named")
        rest = self.pick([False, False, False, False, "left out", True, "schema"])
        if "required" in schema and "never named" in schema["required"]:
            rest = "left out"
        if rest == "schema":
            rest = self.scalar()
        if rest != "left out":
            schema["additionalProperties"] = rest
        if self.chance(0.12):
            schema["patternProperties"] = {self.pick(KEYS): self.scalar()}
        if self.chance(0.1):
            schema["minProperties"] = self.pick([0, 1, 1, 2, 3])
        if self.chance(0.08):
            schema["maxProperties"] = self.pick([1, 2, 4, 6])
        if names and self.chance(0.03):
            schema["properties"][self.pick(names)] = False
            schema["required"] = []
        return schema

    def union(self, depth):
        kind = self.random.randrange(5)
        if kind == 0:  # told apart by a constant
            options = [{"type": "object", "properties": {"kind": {"const": word}, "value": self.any(depth - 1)}, "required": ["kind", "value"],
                        "additionalProperties": False} for word in self.random.sample(["circle", "square", "line"], self.pick([2, 3]))]
            return {self.pick(["anyOf", "oneOf"]): options}
        if kind == 1:  # told apart by their types
            makes = self.random.sample([self.string, self.integer, lambda: {"type": "null"}, lambda: {"type": "boolean"}, lambda: self.array(1)], 2)
            return {"oneOf": [make() for make in makes]}
        if kind == 2:  # they may overlap
            return {"oneOf": [self.integer(), self.number()] if self.chance(0.5) else [self.string(), self.string()]}
        options = [self.any(depth - 1) for _ in range(self.pick([1, 2, 3]))]
        schema = {"anyOf": options}
        if kind == 3 and self.chance(0.4):
            schema.update(self.pick([{"type": ["string", "integer", "object", "array", "null", "boolean"]}, {"maxLength": 12}, {"minimum": 0}]))
        return schema

    def all(self, depth):
        kind = self.random.randrange(3)
        if kind == 0:
            return {"allOf": [{"type": "integer", "minimum": self.pick([0, 5])}, {"maximum": self.pick([50, 100])}]}
        if kind == 1:
            return {"allOf": [{"type": "string", "minLength": self.pick([0, 1])}, {"maxLength": self.pick([5, 9])}, {"pattern": self.pick(["^[a-z]*$", "^\\S*$", "a"])}]}
        first, second = self.object(depth), self.object(max(depth - 1, 1))
        if self.chance(0.7):
            first.pop("additionalProperties", None)
            second["additionalProperties"] = True
        return {"allOf": [first, second]}

    def untyped(self, depth):
        """Keywords that say something of one type only: all others pass."""
        return self.pick([{"minLength": 2, "maxLength": 6}, {"minimum": 3, "maximum": 9}, {"maxItems": 1}, {"required": ["a"]}, {"pattern": "^a+$"}, True,
                          {"properties": {"a": {"type": "integer"}}}, {"items": {"type": "boolean"}, "maxItems": 2}, {"format": "ipv4"}])

    def refused(self, depth):
        """What a server need not know, as long as it says so."""
        return self.pick([{"not": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3},
                          {"type": "array", "contains": {"const": 1}, "maxItems": 2}, {"type": "object", "propertyNames": {"pattern": "^a"}, "maxProperties": 2},
                          {"type": "object", "dependentRequired": {"a": ["b"]}}, {"if": {"type": "string"}, "then": {"maxLength": 2}},
                          {"type": "string", "format": "regex"}, {"type": "object", "unevaluatedProperties": False}, {"type": "string", "pattern": "(?=a)b"},
                          {"$ref": "https://example.com/elsewhere.json"}])


def random_schema(seed):
    """The schema of a seed, the same everywhere."""
    maker = Maker(seed)
    return maker.schema()
