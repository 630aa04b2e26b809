// Hashes of this library's sources, checked by its loader: `quintet.executor.backends.cpu.ops.host_library` rejects one if
// functions or structs are not those that Python calls and fills. setup.py gives both names, as
// `quintet.executor.backends.cpu.ops.host_sources` does.
#include "program.hpp"
#include "sampling.hpp"

// Of the exported functions and of what Python lays out by hand.
QT_EXPORT const char* qt_interface() { return QT_INTERFACE; }

// Of all sources.
QT_EXPORT const char* qt_sources() { return QT_SOURCES; }

// Bytes of the structs that Python lays out by hand.
QT_EXPORT index_t qt_step_bytes() { return sizeof(qt::Step); }
QT_EXPORT index_t qt_draw_settings_bytes() { return sizeof(qt::DrawSettings); }
