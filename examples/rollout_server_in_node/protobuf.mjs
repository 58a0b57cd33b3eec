/**
 * Protocol buffers (proto3): reads .proto sources, decodes messages to plain objects and encodes
 * plain objects.
 *
 * Invariant: no field number is written in JavaScript. Field names are those of the .proto files.
 *
 * An object has every field without presence (0, "", [], ... if it was not sent); fields with
 * presence (messages, `optional`, members of a oneof) are undefined if they were not sent. 64-bit
 * integers are BigInts, bytes are Buffers, enums are numbers. Unknown fields are skipped.
 *
 * Wire format: https://protobuf.dev/programming-guides/encoding.
 */

const VARINT = 0;
const FIXED64 = 1;
const LENGTH = 2;
const GROUP = 3;
const END_GROUP = 4;
const FIXED32 = 5;

const SCALARS = {
  bool: { wire: VARINT, zero: false },
  int32: { wire: VARINT, zero: 0 },
  uint32: { wire: VARINT, zero: 0 },
  sint32: { wire: VARINT, zero: 0 },
  int64: { wire: VARINT, zero: 0n },
  uint64: { wire: VARINT, zero: 0n },
  fixed32: { wire: FIXED32, zero: 0 },
  float: { wire: FIXED32, zero: 0 },
  string: { wire: LENGTH, zero: "" },
  bytes: { wire: LENGTH, zero: Buffer.alloc(0) },
};

/** Bytes that are not a message of the expected type. */
export class DecodeError extends Error {}

/** The messages, enums and services of .proto sources. */
export class Schema {
  #messages = new Map();
  #enums = new Map();
  #services = new Map();

  /** @param {string[]} sources Texts of .proto files that import only one another. */
  constructor(sources) {
    for (const source of sources) {
      new Parser(source, this.#messages, this.#enums, this.#services).file();
    }
    for (const [scope, message] of this.#messages) {
      for (const field of message.byNumber.values()) this.#link(scope, field);
    }
    for (const [scope, service] of this.#services) {
      for (const method of Object.values(service)) {
        method.request = this.#find(scope, method.request);
        method.response = this.#find(scope, method.response);
      }
    }
  }

  /** Returns the methods of a service: name -> {request, response} (full names of messages). */
  service(name) {
    return this.#services.get(name);
  }

  /** Returns the numbers of an enum by name, without the prefix that all names share. */
  enum(name) {
    const prefix = name.split(".").at(-1).replace(/\B(?=[A-Z])/g, "_").toUpperCase() + "_";
    const entries = Object.entries(this.#enums.get(name));
    return Object.fromEntries(entries.map(([key, value]) => [key.replace(prefix, ""), value]));
  }

  /** Decodes a message; throws `DecodeError`. */
  decode(name, bytes) {
    return this.#read(this.#messages.get(name), new Reader(bytes), undefined);
  }

  /** Encodes an object; throws for keys that the message does not have. */
  encode(name, value) {
    const writer = new Writer();
    this.#write(this.#messages.get(name), value, writer);
    return writer.bytes();
  }

  #find(scope, type) {
    for (let at = scope; ; at = at.slice(0, Math.max(0, at.lastIndexOf(".")))) {
      const full = at ? `${at}.${type}` : type;
      if (this.#messages.has(full) || this.#enums.has(full)) return full;
      if (!at) throw new Error(`${scope} names the unknown type ${type}`);
    }
  }

  #link(scope, field) {
    const scalar = SCALARS[field.type];
    if (scalar) {
      field.wire = scalar.wire;
      field.zero = scalar.zero;
    } else {
      const full = this.#find(scope, field.type);
      field.message = this.#messages.get(full);
      field.type = field.message ? "message" : "enum";
      field.wire = field.message ? LENGTH : VARINT;
      field.zero = field.message ? undefined : 0;
    }
    if (field.message || field.optional || field.oneof) field.zero = undefined;
  }

  #read(message, reader, into) {
    const value = into ?? {};
    for (const field of message.byNumber.values()) {
      if (field.repeated) value[field.name] ??= [];
      else if (field.zero !== undefined) value[field.name] ??= field.zero;
    }
    while (!reader.done) {
      const key = Number(reader.varint());
      const number = Math.floor(key / 8);
      const wire = key & 7;
      if (!number) throw new DecodeError("field 0");
      const field = message.byNumber.get(number);
      if (field?.repeated && wire === LENGTH && field.wire !== LENGTH) {
        const packed = reader.part();
        while (!packed.done) value[field.name].push(scalar(field, packed));
      } else if (!field || wire !== field.wire) {
        reader.skip(wire, number);
      } else if (field.repeated) {
        value[field.name].push(this.#one(field, reader, undefined));
      } else {
        const before = value[field.name];
        for (const other of field.oneof ?? []) delete value[other];
        value[field.name] = this.#one(field, reader, before);
      }
    }
    return value;
  }

  #one(field, reader, before) {
    if (!field.message) return scalar(field, reader);
    return this.#read(field.message, reader.part(), before);
  }

  #write(message, value, writer) {
    for (const [name, content] of Object.entries(value)) {
      const field = message.byName.get(name);
      if (!field) throw new Error(`no field ${name} in ${message.name}`);
      if (content === undefined) continue;
      if (!field.repeated) {
        if (content !== field.zero) this.#writeOne(field, content, writer);
      } else if (field.wire === LENGTH) {
        for (const one of content) this.#writeOne(field, one, writer);
      } else if (content.length) {
        const packed = new Writer();
        for (const one of content) writeScalar(field, one, packed);
        writer.varint(field.number * 8 + LENGTH);
        writer.part(packed.bytes());
      }
    }
  }

  #writeOne(field, content, writer) {
    writer.varint(field.number * 8 + field.wire);
    if (!field.message) {
      writeScalar(field, content, writer);
      return;
    }
    const part = new Writer();
    this.#write(field.message, content, part);
    writer.part(part.bytes());
  }
}

function scalar(field, reader) {
  switch (field.type) {
    case "bool":
      return reader.varint() !== 0n;
    case "int32":
    case "enum":
      return Number(BigInt.asIntN(32, reader.varint()));
    case "uint32":
      return reader.uint32();
    case "sint32": {
      const value = reader.uint32();
      return (value >>> 1) ^ -(value & 1);
    }
    case "int64":
      return BigInt.asIntN(64, reader.varint());
    case "uint64":
      return reader.varint();
    case "fixed32":
      return reader.bytes(4).readUInt32LE();
    case "float":
      return reader.bytes(4).readFloatLE();
    case "string":
      try {
        return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(reader.field());
      } catch {
        throw new DecodeError("a string that is not UTF-8");
      }
    default:
      return reader.field();
  }
}

function writeScalar(field, value, writer) {
  switch (field.type) {
    case "fixed32":
      writer.room(4).writeUInt32LE(value);
      break;
    case "float":
      writer.room(4).writeFloatLE(value);
      break;
    case "string":
      writer.part(Buffer.from(value));
      break;
    case "bytes":
      writer.part(value);
      break;
    case "sint32":
      writer.varint(((value << 1) ^ (value >> 31)) >>> 0);
      break;
    default:
      writer.varint(BigInt.asUintN(64, BigInt(value)));
  }
}

class Reader {
  #bytes;
  #at = 0;

  constructor(bytes) {
    this.#bytes = bytes;
  }

  get done() {
    return this.#at === this.#bytes.length;
  }

  /** Reads 64 bits. */
  varint() {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const byte = this.#byte();
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return BigInt.asUintN(64, value);
    }
    throw new DecodeError("a varint of more than ten bytes");
  }

  /** Reads 32 bits: what most numbers are, so without BigInt. */
  uint32() {
    let value = 0;
    for (let place = 0; place < 10; place++) {
      const byte = this.#byte();
      if (place < 5) value |= (byte & 0x7f) << (7 * place);
      if (byte < 0x80) return value >>> 0;
    }
    throw new DecodeError("a varint of more than ten bytes");
  }

  bytes(count) {
    if (count > this.#bytes.length - this.#at) throw new DecodeError("a field beyond the end");
    return this.#bytes.subarray(this.#at, (this.#at += count));
  }

  field() {
    return this.bytes(Number(this.varint()));
  }

  part() {
    return new Reader(this.field());
  }

  skip(wire, number) {
    if (wire === VARINT) this.varint();
    else if (wire === FIXED64) this.bytes(8);
    else if (wire === LENGTH) this.field();
    else if (wire === FIXED32) this.bytes(4);
    else if (wire === GROUP) {
      for (;;) {
        const key = Number(this.varint());
        if ((key & 7) === END_GROUP && Math.floor(key / 8) === number) return;
        this.skip(key & 7, Math.floor(key / 8));
      }
    } else throw new DecodeError(`wire type ${wire}`);
  }

  #byte() {
    if (this.done) throw new DecodeError("a varint beyond the end");
    return this.#bytes[this.#at++];
  }
}

class Writer {
  #buffer = Buffer.alloc(64);
  #length = 0;

  bytes() {
    return this.#buffer.subarray(0, this.#length);
  }

  /** Returns the next bytes, to be filled. */
  room(count) {
    const wanted = this.#length + count;
    if (wanted > this.#buffer.length) {
      const larger = Buffer.alloc(Math.max(wanted, 2 * this.#buffer.length));
      this.#buffer.copy(larger);
      this.#buffer = larger;
    }
    const found = this.#buffer.subarray(this.#length, wanted);
    this.#length = wanted;
    return found;
  }

  varint(value) {
    if (typeof value === "bigint" && value > 0x1fffffn) {
      for (; value > 0x7fn; value >>= 7n) this.room(1)[0] = Number(value & 0x7fn) | 0x80;
      this.room(1)[0] = Number(value);
      return;
    }
    let small = Number(value);
    for (; small > 0x7f; small = Math.floor(small / 128)) this.room(1)[0] = (small % 128) | 0x80;
    this.room(1)[0] = small;
  }

  part(bytes) {
    this.varint(bytes.length);
    this.room(bytes.length).set(bytes);
  }
}

/** Reads what the contract's .proto files use of the language; anything else throws. */
class Parser {
  #tokens;
  #at = 0;
  #package = "";

  constructor(source, messages, enums, services) {
    const plain = source.replace(/\/\/.*|\/\*[\s\S]*?\*\//g, "");
    this.#tokens = plain.match(/"[^"]*"|[\w.]+|\S/g) ?? [];
    this.messages = messages;
    this.enums = enums;
    this.services = services;
  }

  file() {
    while (this.#at < this.#tokens.length) {
      const word = this.#next();
      if (word === "package") this.#package = this.#next();
      if (word === "message") this.#message(this.#package);
      else if (word === "enum") this.#enum(this.#package);
      else if (word === "service") this.#service();
      else this.#statement();
    }
  }

  #next() {
    if (this.#at >= this.#tokens.length) throw new Error("a .proto file ends too soon");
    return this.#tokens[this.#at++];
  }

  #expect(...words) {
    for (const word of words) {
      const found = this.#next();
      if (found !== word) throw new Error(`a .proto file has ${found}, expected ${word}`);
    }
  }

  #statement() {
    while (this.#next() !== ";");
  }

  #message(scope) {
    const name = `${scope}.${this.#next()}`;
    const message = { name, byNumber: new Map(), byName: new Map() };
    this.messages.set(name, message);
    this.#expect("{");
    for (let word = this.#next(); word !== "}"; word = this.#next()) {
      if (word === "message") this.#message(name);
      else if (word === "enum") this.#enum(name);
      else if (word === "reserved") this.#statement();
      else if (word === "oneof") this.#oneof(message);
      else this.#field(message, word);
    }
  }

  #oneof(message) {
    const members = [];
    this.#next();
    this.#expect("{");
    for (let word = this.#next(); word !== "}"; word = this.#next()) {
      const field = this.#field(message, word);
      field.oneof = members;
      members.push(field.name);
    }
  }

  #field(message, word) {
    const label = word === "optional" || word === "repeated" ? word : "";
    const field = { type: label ? this.#next() : word, name: this.#next() };
    if (label) field[label] = true;
    this.#expect("=");
    field.number = Number(this.#next());
    this.#statement();
    message.byNumber.set(field.number, field);
    message.byName.set(field.name, field);
    return field;
  }

  #enum(scope) {
    const values = {};
    this.enums.set(`${scope}.${this.#next()}`, values);
    this.#expect("{");
    for (let word = this.#next(); word !== "}"; word = this.#next()) {
      if (word !== "reserved") {
        this.#expect("=");
        values[word] = Number(this.#next());
      }
      this.#statement();
    }
  }

  #service() {
    const methods = {};
    this.services.set(`${this.#package}.${this.#next()}`, methods);
    this.#expect("{");
    for (let word = this.#next(); word !== "}"; word = this.#next()) {
      const name = this.#next();
      const request = this.#type();
      this.#expect("returns");
      methods[name] = { request, response: this.#type() };
      this.#expect(";");
    }
  }

  #type() {
    this.#expect("(");
    let word = this.#next();
    if (word === "stream") word = this.#next();
    this.#expect(")");
    return word;
  }
}
