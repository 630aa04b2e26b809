// Processor topology and thread affinity.
#pragma once

#include <string>
#include <vector>

namespace qt {

// The processors (hardware threads) in the affinity mask of the process, ascending. Read once, at the first call: a pinned
// thread later calls this function and needs the mask of the process, not its own. Empty where the system has no affinity call.
const std::vector<int>& usable_processors();

// Sorts `processors` for pinning: the first processor of each core, then the second one of each core, and so on. `system`: path
// of sysfs. A core without topology files counts as one processor.
std::vector<int> in_order_of_cores(const std::vector<int>& processors, const std::string& system);

// Pins the calling thread to one processor.
void stay_on(int processor);

}  // namespace qt
