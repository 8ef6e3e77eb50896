"""Is it safe to let a Parquet library read this stranger's file? Decided from its footer and page headers alone.

Two dangers. A file says three times how large it is: in the footer, in each page's header, and in fact. The library
trusts the page: 60 kB of zstd can be a page of 2 GB, and a few bytes of run lengths a billion values of one row. And
the library was written for friends: pyarrow 26.0.1 ends the whole process when its caller looks at a column of which an
optional histogram has the wrong length. So the footer and the headers of all pages are read here first, in Python;
their claims are added up against limits; and only what our own writer makes is let through. A page that claims less
than it holds fails in the library's decompressor, which writes into a buffer of the claimed size.

Let through are: plain values (dictionaries and delta encodings can repeat one long string without end), data pages of
version 1, three codecs, the exact schema, no statistics but the size histograms, no indexes, no encryption, no
key-value metadata.

Format: parquet.thrift of Apache Parquet 2, in Thrift's compact protocol. A struct is read as {field id: value}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAGIC = b"PAR1"
CODECS = {0: "uncompressed", 1: "snappy", 6: "zstd"}
DATA_PAGE, PLAIN, RLE = 0, 0, 3  # PageType, Encoding
FOOTER_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 1 << 12

# Field ids of parquet.thrift that may occur, by struct.
FILE_FIELDS = {1, 2, 3, 4, 6, 7}  # version, schema, num_rows, row_groups, created_by, column_orders
GROUP_FIELDS = {1, 2, 3, 5, 6, 7}  # columns, total_byte_size, num_rows, file_offset, total_compressed_size, ordinal
CHUNK_FIELDS = {2, 3}  # file_offset, meta_data
COLUMN_FIELDS = {1, 2, 3, 4, 5, 6, 7, 9, 13, 16}  # type .. total_compressed_size, data_page_offset, two statistics
PAGE_FIELDS = {1, 2, 3, 4, 5}  # type, uncompressed and compressed size, crc, data_page_header
DATA_PAGE_FIELDS = {1, 2, 3, 4, 5}  # num_values, encoding, definition and repetition level encoding, statistics (none)

Struct = dict[int, Any]


class UnsafeFile(ValueError):
    """Why a file is not read. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class ParquetLimits:
    rows: int
    values_per_column: int  # list elements, and rows without one
    unpacked_bytes: int  # all pages together
    row_groups: int = 64


def read_footer(data: memoryview) -> Struct:
    """The footer of a Parquet file as it stands, or UnsafeFile."""
    if len(data) < 12 or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise UnsafeFile("the file is no Parquet file: it must begin and end with PAR1")
    size = int.from_bytes(data[-8:-4], "little")
    if not 0 < size <= min(FOOTER_BYTES_MAX, len(data) - 12):
        raise UnsafeFile(f"the file claims a footer of {size} bytes in {len(data)}, at most {FOOTER_BYTES_MAX}")
    footer, read = read_struct(data[-8 - size : -8], "footer")
    if read != size:
        raise UnsafeFile(f"the footer ends after {read} of its {size} bytes")
    _only(footer, FILE_FIELDS, "the footer")
    return footer


def check_file(data: memoryview, schema: list[Struct], limits: ParquetLimits) -> None:
    """Raise UnsafeFile unless all of `data` keeps within `limits` by its own word, has exactly the `schema` (field 2 of
    the footer of a good file), and no odd parts."""
    footer = read_footer(data)
    _check_schema(_list(footer, 2, 10 * len(schema), "schema"), schema)
    levels = leaf_levels(schema)
    groups = _list(footer, 4, limits.row_groups, "row groups")
    rows = [_count(group.get(3), "a row group") for group in groups]
    if sum(rows) != _count(footer.get(3), "the footer") or sum(rows) > limits.rows:
        raise UnsafeFile(f"the file claims {footer[3]} rows, its groups {sum(rows)}, at most {limits.rows} are allowed")
    if not sum(rows):
        raise UnsafeFile("the file has no rows")
    values = [0] * len(levels)
    unpacked = 0
    for number, group in enumerate(groups):
        _only(group, GROUP_FIELDS, f"row group {number}")
        chunks = _list(group, 1, len(levels), f"columns in row group {number}")
        if len(chunks) != len(levels):
            raise UnsafeFile(f"row group {number} has {len(chunks)} columns, expected {len(levels)}")
        for index, (chunk, level) in enumerate(zip(chunks, levels, strict=True)):
            where = f"column {index} of row group {number}"
            page_values, page_bytes = _chunk(data, chunk, where, level)
            values[index] += page_values
            unpacked += page_bytes
            if values[index] > limits.values_per_column:
                raise UnsafeFile(f"{where} claims {page_values} values, at most {limits.values_per_column} are allowed")
            if unpacked > limits.unpacked_bytes:
                raise UnsafeFile(f"the file unpacks to more than the {limits.unpacked_bytes} bytes allowed, at {where}")


def _check_schema(found: list[Struct], expected: list[Struct]) -> None:
    names, wanted = ([element.get(4) for element in elements if not element.get(5)] for elements in (found, expected))
    if names != wanted:
        raise UnsafeFile(f"the columns are {names[:40]}, expected {wanted}")
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            raise UnsafeFile(f"schema element {number} ({other[4]!r}) is {one}, expected {other}")
    if len(found) != len(expected):
        raise UnsafeFile(f"the schema has {len(found)} elements, expected {len(expected)}")


def leaf_levels(schema: list[Struct]) -> list[tuple[int, int]]:
    """(repetition, definition) level of each column: how many of its ancestors and itself repeat, or may be absent."""
    levels: list[tuple[int, int]] = []

    def walk(at: int, repetition: int, definition: int) -> int:
        element = schema[at]
        if at:  # the root has no level
            repetition += element.get(3) == 2
            definition += element.get(3) in (1, 2)
        children = element.get(5) or 0
        at += 1
        for _ in range(children):
            at = walk(at, repetition, definition)
        if not children:
            levels.append((repetition, definition))
        return at

    walk(0, 0, 0)
    return levels


def _chunk(data: memoryview, chunk: Struct, where: str, level: tuple[int, int]) -> tuple[int, int]:
    """(values, unpacked bytes) that the pages of one column chunk claim."""
    _only(chunk, CHUNK_FIELDS, where)
    column = chunk.get(3)
    if not isinstance(column, dict):
        raise UnsafeFile(f"{where} is not described")
    _only(column, COLUMN_FIELDS, where)
    _check_histograms(column.get(16, {}), level, where)
    if column.get(4) not in list(CODECS):
        raise UnsafeFile(f"{where} is compressed by codec {column.get(4)}, expected one of {CODECS}")
    start = _count(column.get(9), where)
    end = start + _count(column.get(7), where)
    if not 4 <= start < end <= len(data):
        raise UnsafeFile(f"{where} lies at bytes {start} to {end} of {len(data)}")
    values = unpacked = 0
    while start < end:
        header, read = read_struct(data[start : min(end, start + HEADER_BYTES_MAX)], where)
        _only(header, PAGE_FIELDS, f"a page of {where}")
        page = header.get(5)
        if header.get(1) != DATA_PAGE or not isinstance(page, dict):
            raise UnsafeFile(f"{where} has a page of type {header.get(1)}, expected data pages of version 1")
        _only(page, DATA_PAGE_FIELDS, f"a page of {where}")
        if page.get(5):
            raise UnsafeFile(f"{where} has a page with statistics, which are not allowed here")
        if (page.get(2), page.get(3), page.get(4)) != (PLAIN, RLE, RLE):
            raise UnsafeFile(f"{where} has values of encoding {page.get(2)}, expected plain ({PLAIN})")
        count, size, packed = (_count(claim, where) for claim in (page.get(1), header.get(2), header.get(3)))
        start += read + packed
        if start > end:
            raise UnsafeFile(f"{where} has a page of {packed} packed bytes, more than are left of it")
        values, unpacked = values + count, unpacked + size
    if values != column.get(5):
        raise UnsafeFile(f"{where} claims {column.get(5)} values, its pages {values}")
    return values, unpacked


def _check_histograms(statistics: Any, level: tuple[int, int], where: str) -> None:
    """Field 16: how often each repetition (2) and definition level (3) occurs; absent, empty, or one count a level."""
    if not isinstance(statistics, dict):
        raise UnsafeFile(f"{where} has size statistics that are none")
    _only(statistics, {1, 2, 3}, where)
    for field, levels in zip((2, 3), level, strict=True):
        histogram = statistics.get(field, [])
        if not isinstance(histogram, list) or len(histogram) not in (0, levels + 1):
            raise UnsafeFile(f"{where} has a histogram that does not fit its {levels + 1} levels")


def _only(fields: Struct, allowed: set[int], what: str) -> None:
    if not fields.keys() <= allowed:
        raise UnsafeFile(
            f"{what} has field {min(fields.keys() - allowed)} of parquet.thrift, which is not allowed here"
        )


def _list(fields: Struct, field: int, most: int, what: str) -> list[Struct]:
    found = fields.get(field)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UnsafeFile(f"the file does not list its {what}")
    if len(found) > most:
        raise UnsafeFile(f"the file has {len(found)} {what}, at most {most} are allowed")
    return found


def _count(claim: Any, what: str) -> int:
    if not isinstance(claim, int) or isinstance(claim, bool) or claim < 0:
        raise UnsafeFile(f"{what} counts {claim} of something")
    return claim


def read_struct(data: memoryview, where: str) -> tuple[Struct, int]:
    """One Thrift compact struct, and how many bytes it took."""
    reader = _Compact(data, where)
    return reader.struct(depth=0), reader.at


class _Compact:
    """Just enough of Thrift's compact protocol for parquet.thrift. Takes time in proportion to the bytes given."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def refuse(self, why: str) -> UnsafeFile:
        return UnsafeFile(f"the header of {self.where} {why}")

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise self.refuse("does not end")
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self.refuse("has a number of more than ten bytes")

    def zigzag(self) -> int:
        raw = self.varint()
        return (raw >> 1) ^ -(raw & 1)

    def struct(self, depth: int) -> Struct:
        if depth > 8:
            raise self.refuse("is nested too deeply")
        fields: Struct = {}
        field = 0
        while head := self.take(1)[0]:
            step, kind = head >> 4, head & 0x0F
            field = field + step if step else self.zigzag()
            if field in fields:
                raise self.refuse(f"has field {field} twice")
            fields[field] = kind == 1 if kind in (1, 2) else self.value(kind, depth)  # a bool's value is its type
        return fields

    def value(self, kind: int, depth: int) -> Any:
        match kind:
            case 3:
                return self.take(1)[0]
            case 4 | 5 | 6:  # i16, i32, i64
                return self.zigzag()
            case 8:
                return bytes(self.take(self.varint()))
            case 9:
                head = self.take(1)[0]
                size = head >> 4 if head >> 4 < 15 else self.varint()
                if size > len(self.data):  # each element takes a byte or more
                    raise self.refuse("has a list longer than the file")
                return [self.value(head & 0x0F, depth) for _ in range(size)]
            case 12:
                return self.struct(depth + 1)
        raise self.refuse(f"has a value of type {kind}")
