// Hashes of the library's sources. The loader, `quintet.executor.backends.cpu.ops.host_library`, rejects a library if its
// functions or structs differ from those that Python calls and fills. setup.py defines both macros with
// `quintet.executor.backends.cpu.ops.host_sources`.
#include "program.hpp"
#include "sampling.hpp"

// Returns the hash of the exported functions and of the structs with a Python layout.
QT_EXPORT const char* qt_interface() { return QT_INTERFACE; }

// Returns the hash of all sources.
QT_EXPORT const char* qt_sources() { return QT_SOURCES; }

// Size in bytes of the structs with a Python layout.
QT_EXPORT index_t qt_step_bytes() { return sizeof(qt::Step); }
QT_EXPORT index_t qt_draw_settings_bytes() { return sizeof(qt::DrawSettings); }
