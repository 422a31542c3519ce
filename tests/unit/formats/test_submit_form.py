"""POST /api/submit: the form, and the flat YAML in it."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import texts

import nexus

PLAIN_TYPE = "multipart/form-data; boundary=B"


def make_form(fields, boundary="B", **headers):
    """A multipart body as curl writes it: [(name, file name or None, content)]."""
    made = b""
    for name, file_name, content in fields:
        file = f'; filename="{file_name}"\r\nContent-Type: application/octet-stream' if file_name is not None else ""
        made += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return made + f"--{boundary}--\r\n".encode()


CONFIG_FILE = (b'competition_id: "comp123"\nproject_id: "proj456"\nuser_id: "myuser"\nexpected_time: 10  # seconds\n'
               b'token: "my-secret-token"\n')
BOTH = [("code", "a.py", b"print()\n"), ("config_file", "c.yaml", b"name: a")]
contents = st.binary(max_size=60) | st.lists(st.sampled_from([
    b"\r", b"\n", b"\r\n", b"--", b"-", b"\0", b"\xff", b"\n--B--\n", b"\r--B", b"x", b"\r\n\r\n", b"--B", b" "])).map(b"".join)


@given(contents.filter(bytes.strip), st.sampled_from(["B", "------------------------d74496d66958873e", "a b'()+_,-./:=?"]))
def test_a_script_is_taken_byte_for_byte(code, boundary):
    if f"\r\n--{boundary}".encode() in b"\r\n" + code + b"\r\n":
        return                                                  # a sender chooses another
    body = make_form([("code", "../../etc/passwd", code), ("config_file", "config.yaml", CONFIG_FILE)], boundary)
    assert nexus.parse_submit_form(body, f'multipart/form-data; boundary="{boundary}"') == (code, {
        "competition_id": "comp123", "project_id": "proj456", "user_id": "myuser", "expected_time": 10, "token": "my-secret-token"})


FORMS = [  # reason, body, content type
    ("as curl sends it", make_form(BOTH), PLAIN_TYPE), ("the other way round", make_form(BOTH[::-1]), PLAIN_TYPE),
    ("without quotes", make_form(BOTH).replace(b'name="code"', b"name=code"), PLAIN_TYPE),
    ("blanks behind the boundary", make_form(BOTH).replace(b"--B\r\n", b"--B \t\r\n", 1), PLAIN_TYPE),
    ("any case", make_form(BOTH).replace(b"Content-Disposition: form-data", b"content-disposition:Form-Data"),
     "Multipart/Form-Data; Charset=utf-8; Boundary=B"),
    ("no line end behind it", make_form(BOTH)[:-2], PLAIN_TYPE),
]


@pytest.mark.parametrize("reason, body, content_type", FORMS, ids=[case[0] for case in FORMS])
def test_parse_submit_form(reason, body, content_type):
    assert nexus.parse_submit_form(body, content_type) == (b"print()\n", {"name": "a"})


WRONG_FORMS = [  # reason, body, content type, kind, words
    ("no type", make_form(BOTH), "", "unsupported_media_type", "nothing"),
    ("JSON", make_form(BOTH), "application/json", "unsupported_media_type", "application/json"),
    *((reason, body, content_type, "usage", "must have the fields code and config_file") for reason, body, content_type in (
        ("no boundary", make_form(BOTH), "multipart/form-data"), ("another boundary", make_form(BOTH), "multipart/form-data; boundary=C"),
        ("nothing", b"", PLAIN_TYPE), ("something before it", b"hello\r\n" + make_form(BOTH), PLAIN_TYPE),
        ("cut in a field", make_form(BOTH)[:-9], PLAIN_TYPE), ("no fields", b"--B--\r\n", PLAIN_TYPE),
        ("no code", make_form(BOTH[1:]), PLAIN_TYPE), ("no config_file", make_form(BOTH[:1]), PLAIN_TYPE),
        ("code twice", make_form([*BOTH, BOTH[0]]), PLAIN_TYPE), ("another field", make_form([*BOTH, ("x", "x", b"x")]), PLAIN_TYPE),
        ("no headers", b"--B\r\n\r\nx\r\n--B--\r\n", PLAIN_TYPE))),
    ("empty code", make_form([("code", "c", b" \n"), BOTH[1]]), PLAIN_TYPE, "usage", "code is empty"),
    ("large code", make_form([("code", "c", b"x" * (5 * 2**20 + 1)), BOTH[1]]), PLAIN_TYPE, "too_large", "5242880"),
    ("a large config_file", make_form([BOTH[0], ("config_file", "c", b"#" * 65537)]), PLAIN_TYPE, "too_large", "65536"),
]


@pytest.mark.parametrize("reason, body, content_type, kind, words", WRONG_FORMS, ids=[case[0] for case in WRONG_FORMS])
def test_parse_submit_form_refuses(reason, body, content_type, kind, words):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submit_form(body, content_type)
    assert caught.value.kind == kind and words in caught.value.message, reason


def test_a_large_form_takes_no_time():
    code = b"\r\n-" * (5 * 2**20 // 3)
    began = time.monotonic()
    assert nexus.parse_submit_form(make_form([("code", "a.py", code), BOTH[1]]), PLAIN_TYPE)[0] == code
    with pytest.raises(nexus.NexusError):
        nexus.parse_submit_form(b"--B\r\n" + b"\r\n--Bx" * 2**20, PLAIN_TYPE)
    with pytest.raises(nexus.NexusError):
        nexus.parse_submit_config(f"name: {'a ' * 16384}{'# ' * 16384}\"\n[")
    for token in ('"' + '" ' * 32768 + "x", f"x{' ' * 65536}x"):
        with pytest.raises(nexus.NexusError) as caught:
            nexus.parse_submit_config(f"token: {token}")
        assert "x" not in caught.value.message.partition("token")[2].replace("text", ""), "what it is, is not shown"
    assert time.monotonic() - began < 5


CONFIG_FILES = [  # reason, text, what it says
    ("the seed's", 'user_id: "myuser"\nexpected_time: 10  # seconds\n', {"user_id": "myuser", "expected_time": 10}),
    ("numbers", "expected_time: 1.5\ngpus: 0.5\npriority: -1", {"expected_time": 1.5, "gpus": 0.5, "priority": -1}),
    ("in quotes, too", "expected_time: '10'\ngpus: \"2\"\npriority: 'high'", {"expected_time": 10, "gpus": 2, "priority": 0}),
    ("digits may be a name as they are", "user_id: 007\nname: 1.10\ntoken: 12345678901234567890", {
        "user_id": "007", "name": "1.10", "token": "12345678901234567890"}),
    ("nothing said", "user_id:\nname: # later\nproject_id:  \ntoken: ''", {"token": ""}),
    ("quotes", "name: 'x # no comment'  # one\nuser_id: \"it's\"", {"name": "x # no comment", "user_id": "it's"}),
    ("comments", "name: b#c\nuser_id: e #f\nproject_id: h\t# i", {"name": "b#c", "user_id": "e", "project_id": "h"}),
    ("plain texts", "user_id: -x\nproject_id: http://x/y?z: a\ncompetition_id: größe 🚀", {
        "user_id": "-x", "project_id": "http://x/y?z: a", "competition_id": "größe 🚀"}),
    ("the mark that begins a document", "---\nname: a\n", {"name": "a"}), ("ends of lines", "name: a\r\nuser_id: b\r\n", {
        "name": "a", "user_id": "b"}),
    ("blanks", "name :  a  \nuser_id:\tb\t\n", {"name": "a", "user_id": "b"}),
]


@pytest.mark.parametrize("reason, text, said", CONFIG_FILES, ids=[case[0] for case in CONFIG_FILES])
def test_parse_submit_config(reason, text, said):
    assert nexus.parse_submit_config(text) == said, reason


WRONG_CONFIGS = [  # reason, text, words of the message, of the hint
    ("an unknown key", "user_id: x\nexpectedtime: 5", "'expectedtime' is no key", "expected_time"),
    ("one like no other", "zzz: 5", "'zzz'", "competition_id, project_id, user_id, expected_time"),
    ("no time", "expected_time: ten", "expected_time must be seconds, or a time like 90s", ""),
    ("no time at all", "expected_time: 0", "expected_time", ""), ("GPUs by name", "gpus: all", "gpus", ""),
    ("an empty name", 'name: ""', "name", ""), ("no priority", "priority: urgent", "priority", ""), ("a list", "gpus: [1]", "gpus", ""),
    ("a list in lines", "name:\n  - b", "no key", ""), ("a text", "hello", "'hello'", ""), ("JSON", '{"name": 1}', "no key", ""),
    ("over two lines", "name: 'b\nc'", "no key", ""), ("an escape of terminals", "name: \x1b[2J", "name", ""),
]


@pytest.mark.parametrize("reason, text, words, hint", WRONG_CONFIGS, ids=[case[0] for case in WRONG_CONFIGS])
def test_parse_submit_config_refuses(reason, text, words, hint):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submit_config(text)
    error = caught.value
    assert error.kind == "usage" and words in error.message and error.message.startswith("config_file: "), (reason, error.message)
    assert hint in error.hint, (reason, error.hint)


@given(texts | st.lists(st.sampled_from(["a", "name: ", ": ", "\n", "\r", '"', "'", "\\", "#", " ", "\t", "---", "...", "-", "[", "|", "1",
                                         "e9", "\\u",
                                         "0041", "token: ", "expected_time: ", "\ufeff", "\ud800"])).map("".join))
def test_whatever_comes_is_a_config_file_or_refused(text):
    try:
        assert nexus.parse_submit_config(text).keys() <= nexus.FORM_KEYS.keys()
    except nexus.NexusError as error:
        assert error.kind == "usage" and error.message.startswith("config_file: ")
        assert not re.search(nexus.CONTROL, error.message)
