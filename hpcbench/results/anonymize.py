"""Replacement of names of people, machines and folders by consistent pseudonyms.
Names are first collected by the ``learn_*`` methods or recognised by their form, then replaced by ``text`` and
``document``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from typing import Any, get_args, get_type_hints

import msgspec

from hpcbench.config.run_spec import RunTask, TaskFileHeader
from hpcbench.results.attempts import AttemptStart
from hpcbench.results.schema import RankResult, RunResult

_IMPERSONAL_USERS = frozenset({"root", "nobody", "daemon", "admin", "user", "shared", "local", "public"})
"""Accounts and folders under /home that are no person's name."""
_IMPERSONAL_HOSTS = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_UNCHANGED_KEYS = frozenset({
    "run_id", "config_id", "environment_digest", "status", "strategy", "dataset", "precision", "optimizer", "scheduler",
    "launcher", "spec_version", "schema_version",
})  # fmt: skip
"""Keys whose values are terms of hpcbench, also where a person has the same name."""
_RECORDS = (RunResult, RankResult, AttemptStart, TaskFileHeader, RunTask)


def _field_names(kind: Any) -> set[str]:
    """The names of all fields of a record and of the records in it."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inner = [_field_names(hint) for hint in get_type_hints(kind).values()]
        return {*kind.__struct_fields__}.union(*inner)
    return set().union(*map(_field_names, get_args(kind)))


_RECORD_FIELDS = frozenset(name for record in _RECORDS for name in _field_names(record))
"""Names of our own fields; readers look for them."""
_HOST_KEYS = frozenset({"host", "hosts", "hostname", "submit_host", "address", "nodelist", "step_nodelist"})
_PERSONAL_KEYS = frozenset({"account", "reservation"})
_FOLDER_KEYS = {"model_folder": "models", "data_folder": "data"}
_IMAGE_SUFFIXES = (".sif", ".sqsh", ".simg", ".img")

_MAX_CACHED_LENGTH, _MAX_CACHED_TEXTS = 500, 100_000

_FOLDER_TEMPLATE = r"(?<![A-Za-z0-9_.-]){}(?![A-Za-z0-9_-])"
_WORD_TEMPLATE = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
_HOME_FOLDER = re.compile(r"/(?:home|Users|users|homes|u)/([A-Za-z_][A-Za-z0-9._-]*)")
_HOST_LIST = re.compile(r"([A-Za-z][A-Za-z0-9.-]*)\[([0-9][0-9,-]*)\]")
_NUMBERED_HOST = re.compile(r"([A-Za-z0-9-]*[A-Za-z-]{2,})([0-9]+)")
_ACCOUNT_OPTION = re.compile(r"(?m)^#SBATCH\s+(?:--account[= ]|-A ?)'?\"?([^\s'\"]+)")
_HOST_OPTION = re.compile(r"(?m)^#SBATCH\s+(?:--(?:nodelist|exclude)[= ]|-[wx] ?)'?\"?([^\s'\"]+)")

_MAIL_ADDRESS = re.compile(r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
_MAC_ADDRESS = re.compile(
    r"(?<![0-9A-Fa-f:-])[0-9A-Fa-f]{2}(?:([:-])[0-9A-Fa-f]{2})(?:\1[0-9A-Fa-f]{2}){4,18}(?![0-9A-Fa-f:-])"
)
_MAC_IN_NAME = re.compile(r"\b((?:en|ib|wl|ww)x)([0-9a-f]{12})\b")
"""Interfaces that are called by their address."""
_IPV6 = re.compile(
    r"(?<![A-Za-z0-9_:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*(?:%[A-Za-z0-9_.-]+)?(?![A-Za-z0-9_:])"
)
_IPV4 = re.compile(r"(?<![0-9.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9]|\.[0-9])")
_GPU_UUID = re.compile(
    r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
)
_NUMERIC_ID = re.compile(r"\b([ug]id)([ =:]{1,2})([0-9]+)")


class Anonymizer:
    """Learns names and replaces them. Pseudonyms are numbered in the order in which their names were met."""

    def __init__(self) -> None:
        self._pseudonyms: dict[tuple[str, str], str] = {}
        self._words: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._domains: set[str] = set()
        self._host_families: set[tuple[str, int]] = set()
        self._counts: Counter[str] = Counter()
        self._pattern: re.Pattern[str] | None = None
        self._cache: dict[str, str] = {}
        """Short texts that came by already: the same few stand in every result."""

    def learn_user(self, name: str, home: str | None = None, full_name: str = "") -> None:
        """A person's account, home folder and name."""
        pseudonym = self._pseudonym("user", name)
        if home and home.count("/") > 0 and home not in ("/", "/nonexistent"):
            self._register(self._folders, home.rstrip("/"), f"/home/{pseudonym}")
        if name.lower() not in _IMPERSONAL_USERS:
            self._register(self._words, name, pseudonym)
            if " " in full_name:
                self._register(self._words, full_name, pseudonym)

    def learn_account(self, name: str) -> None:
        """Replace the name of an account from now on."""
        self._register(self._words, name, self._pseudonym("account", name))

    def learn_folder(self, kind: str, path: str) -> None:
        """A folder whose place identifies its owner; paths of fewer than two parts do not."""
        path = path.rstrip("/")
        if path.count("/") >= 2:
            self._register(self._folders, path, "/" + self._pseudonym(kind, path))

    def learn_hosts(self, text: str) -> None:
        """One host, or a scheduler's list of them: ``node[01-04,07],login1``."""
        for name in expand_host_list(text):
            self._host(name)

    def learn_text(self, text: str) -> None:
        """Homes, and accounts and hosts of #SBATCH lines."""
        for name in _HOME_FOLDER.findall(text):
            if name.lower() not in _IMPERSONAL_USERS:
                self.learn_user(name)
        for name in _ACCOUNT_OPTION.findall(text):
            self.learn_account(name)
        for name in _HOST_OPTION.findall(text):
            self.learn_hosts(name)

    def learn_document(self, value: Any, key: str = "") -> None:
        """Hosts, accounts and homes anywhere in decoded JSON."""
        if isinstance(value, dict):
            for name, inner in value.items():
                self.learn_text(name)
                self.learn_document(inner, name)
        elif isinstance(value, list):
            for inner in value:
                self.learn_document(inner, key)
        elif isinstance(value, str):
            self.learn_text(value)
            if key in _HOST_KEYS:
                self.learn_hosts(value)
            elif key in _PERSONAL_KEYS and value:
                self._register(self._words, value, self._pseudonym(key, value))
            elif key == "container" and value.startswith("/") and value.endswith(_IMAGE_SUFFIXES):
                self.learn_folder("images", os.path.dirname(value))  # noqa: PTH120 - text, no file of ours
            elif key == "tree":
                self.learn_folder("tree", os.path.dirname(value.rstrip("/")))  # noqa: PTH120 - text, no file of ours
            elif key in _FOLDER_KEYS:
                self.learn_folder(_FOLDER_KEYS[key], value)

    def document(self, value: Any, key: str = "") -> Any:
        """Decoded JSON with pseudonyms, in keys too."""
        if isinstance(value, dict):
            return {
                name if name in _RECORD_FIELDS else self.text(name): self.document(inner, name)
                for name, inner in value.items()
            }
        if isinstance(value, list):
            return [self.document(inner, key) for inner in value]
        if isinstance(value, str) and key not in _UNCHANGED_KEYS:
            return self.text(value)
        return value

    def text(self, text: str) -> str:
        """``text`` with pseudonyms."""
        if text not in self._cache:
            replaced = self._replaced(text)
            if len(text) > _MAX_CACHED_LENGTH or len(self._cache) > _MAX_CACHED_TEXTS:
                return replaced
            self._cache[text] = replaced
        return self._cache[text]

    def _replaced(self, text: str) -> str:
        text = _MAIL_ADDRESS.sub(lambda match: self._pseudonym("mail", match[0].lower()), text)
        text = _MAC_ADDRESS.sub(lambda match: self._pseudonym("mac", match[0].lower().replace("-", ":")), text)
        text = _MAC_IN_NAME.sub(
            lambda match: f"{match[1]}-{self._pseudonym('mac', ':'.join(re.findall('..', match[2])))}", text
        )
        text = _IPV6.sub(self._address, text)
        text = _IPV4.sub(self._address, text)
        text = _GPU_UUID.sub(lambda match: self._pseudonym("gpu", match[0].lower()), text)
        text = _NUMERIC_ID.sub(lambda match: match[1] + match[2] + self._pseudonym(match[1], match[3])[4:], text)
        text = _HOST_LIST.sub(self._host_list, text)
        for domain in sorted(self._domains, key=len, reverse=True):
            text = re.sub(
                rf"(?<![A-Za-z0-9.-])([A-Za-z0-9-]+)\.{re.escape(domain)}(?![A-Za-z0-9-])",
                lambda match: self._host(match[0]),
                text,
            )
        for prefix, digits in sorted(self._host_families):
            # A network's own name of a host adds a letter (JUWELS' ``i``).
            text = re.sub(
                _WORD_TEMPLATE.format(f"({re.escape(prefix)}[0-9]{{{digits}}})[a-z]?"),
                lambda match: self._host(match[1]),
                text,
            )
        if self._pattern is None:
            patterns = [
                template.format(re.escape(name))
                for template, names in ((_FOLDER_TEMPLATE, self._folders), (_WORD_TEMPLATE, self._words))
                for name in sorted(names, key=lambda name: (-len(name), name))
            ]
            self._pattern = re.compile("|".join(patterns) or r"(?!)", re.IGNORECASE)
        pattern = self._pattern
        return pattern.sub(lambda match: self._folders.get(match[0].lower()) or self._words[match[0].lower()], text)

    def _register(self, table: dict[str, str], name: str, pseudonym: str) -> None:
        if name and name.lower() not in table:
            table[name.lower()] = pseudonym
            self._pattern = None
            self._cache.clear()

    def _pseudonym(self, kind: str, name: str) -> str:
        if (kind, name) not in self._pseudonyms:
            self._counts[kind] += 1
            self._pseudonyms[kind, name] = f"{kind}-{self._counts[kind]}"
        return self._pseudonyms[kind, name]

    def _host(self, name: str) -> str:
        """The pseudonym of a host, by its short name or with its domain."""
        name = name.strip().lower()
        if not name or name in _IMPERSONAL_HOSTS or _parse_address(name.partition("%")[0].strip("[]")):
            return name
        short, _, domain = name.partition(".")
        pseudonym = self._pseudonym("node", short)
        self._register(self._words, short, pseudonym)
        if domain:
            self._register(self._words, name, pseudonym)
            self._domains.add(domain)
            self._register(self._words, domain, self._pseudonym("domain", domain))
        family = _host_family(short)
        if family is not None:
            self._host_families.add(family)
        return pseudonym

    def _host_list(self, match: re.Match[str]) -> str:
        names = expand_host_list(match[0])
        is_own = any(name.lower() in self._words or _host_family(name.lower()) in self._host_families for name in names)
        return ",".join(self._host(name) for name in names) if is_own else match[0]

    def _address(self, match: re.Match[str]) -> str:
        text, _, zone = match[0].partition("%")
        # The end of a sentence is no part of an address.
        end = text[len(text.rstrip(".")) :]
        address = _parse_address(text.rstrip("."))
        if address is None or address.is_loopback or address.is_unspecified:
            return match[0]
        return self._pseudonym("ip", str(address)) + end + (f"%{zone}" if zone else "")


def _host_family(name: str) -> tuple[str, int] | None:
    """Return the common form of a cluster's host names: letters, and the number of digits."""
    match = _NUMBERED_HOST.fullmatch(name)
    return (match[1], len(match[2])) if match else None


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def expand_host_list(text: str, limit: int = 100_000) -> list[str]:
    """``n[01-02,5].x,login -> n01.x, n02.x, n5.x, login``: SLURM's lists of hosts, at most ``limit`` of them."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[]*)\[([0-9,-]+)\](.*)", part)
        if match is None:
            names.append(part)
            continue
        for piece in match[2].split(","):
            first, _, last = piece.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                most = limit - len(names)
                numbers = range(int(first), min(int(last or first), int(first) + most - 1) + 1)
                names += [f"{match[1]}{number:0{len(first)}d}{match[3]}" for number in numbers]
    return names[:limit]
